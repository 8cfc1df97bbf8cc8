// What the sources that Triton compiles for Intel GPUs include, and call of each.
#include <Python.h>
#include <level_zero/ze_api.h>
#include <sycl/sycl.hpp>

extern "C" PyObject *devices() {
    zeInit(0);
    return PyLong_FromSize_t(sycl::device::get_devices().size());
}
