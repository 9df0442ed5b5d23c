"""Every setting of every command, the shape of a model, the device, and the events of a run.

Options, ``--config`` and ``run.json`` follow from these dataclasses. Only `device` imports torch.
"""
