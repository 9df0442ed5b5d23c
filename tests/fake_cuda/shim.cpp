// Makes a CPU build of torch accept tensors that report a CUDA device.
//
// Autograd gets a stream from the tensor's device guard, and asks the CUDA hooks whether CUDA exists. A CPU build has no
// CUDA guard, and its hooks report no CUDA. `install` registers a guard with a single stream, and hooks that report CUDA;
// `uninstall` restores the originals.
#include <new>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream default_stream() { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Device exchangeDevice(Device) const override { return {DeviceType::CUDA, 0}; }
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return default_stream(); }
  Stream getNewStream(Device, int = 0) const override { return default_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return default_stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

// The hooks object is never freed. Neither class has data, so either can be constructed in the same memory.
void* hooks_address() { return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()); }

auto& guard_slot() { return impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)]; }

}  // namespace

extern "C" void install() {
  static const Guard* guard = new Guard;
  guard_slot().store(guard);
  new (hooks_address()) Hooks;
}

extern "C" void uninstall() {
  guard_slot().store(nullptr);
  new (hooks_address()) at::CUDAHooksInterface;
}
