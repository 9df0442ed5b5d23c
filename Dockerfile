# gpt serve on the CPU. This image has never been built; please report what fails.
#   docker build -t gpt .
#   docker run -p 127.0.0.1:8000:8000 -e GPT_SERVE_API_KEY=… -v ./runs:/home/gpt/runs:ro gpt
# serves the newest run in ./runs; add -m runs/book to name another.
FROM python:3.11-slim
# The compiler builds the decoder for the CPU on first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /src/constraints.txt '/src[serve,gguf]'
RUN useradd --create-home gpt
USER gpt
WORKDIR /home/gpt
VOLUME /home/gpt/runs
ENV GPT_SERVE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --start-period=2m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["gpt", "serve"]
