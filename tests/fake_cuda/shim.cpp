// Makes a torch without CUDA take tensors that say they lie on CUDA, until it is told to stop.
//
// Autograd asks the device guard of a tensor's device for a stream, and the hooks whether CUDA is there. A CPU build
// has no guard for CUDA, and hooks that say no. `put_on` registers a guard whose streams are all one and hooks that say
// yes; `take_off` puts back what was there.
#include <new>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream only() { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Device exchangeDevice(Device) const override { return {DeviceType::CUDA, 0}; }
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getNewStream(Device, int = 0) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

// The one object of hooks lives as long as the process. Neither class has data, so one can be made in the other's place.
void* place() { return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()); }

auto& registered() { return impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)]; }

}  // namespace

extern "C" void put_on() {
  static const Guard* guard = new Guard;
  registered().store(guard);
  new (place()) Hooks;
}

extern "C" void take_off() {
  registered().store(nullptr);
  new (place()) at::CUDAHooksInterface;
}
