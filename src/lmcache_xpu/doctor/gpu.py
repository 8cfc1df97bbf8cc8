"""Checks of the Intel GPU: nodes, permissions, driver, runtime, PyTorch's view."""

from __future__ import annotations

from lmcache_xpu.doctor.check import Check, fail, ok, passes, warn
from lmcache_xpu.launch.machine import Machine, TorchFacts
from lmcache_xpu.launch.preflight import check_render_nodes
from lmcache_xpu.launch.settings import Settings

INTEL = "0x8086"
LOADER = "libze_loader.so.1"
DRIVER = "libze_intel_gpu.so.1"
SYCL = ("libsycl.so.9", "libsycl.so.8")
B70 = "0xe223"
NO_COPY_ENGINE = "UR_L0_V2_FORCE_DISABLE_COPY_OFFLOAD"


def check_nodes(machine: Machine) -> Check:
    """Check that there are render nodes and that this process may use them."""
    usable, closed = (
        ", ".join(node.name for node in machine.render_nodes() if machine.may_open(node) is opens)
        for opens in (True, False)
    )
    check = passes("device nodes", usable, check_render_nodes, machine)
    if check.outcome == "ok" and closed:
        advice = "Fine if those are not for this engine; else add the group that owns them."
        return warn(check.name, f"{usable}; not {closed}", advice)
    return check


def check_driver(machine: Machine) -> Check:
    """Check the kernel driver behind the render nodes."""
    name, drivers = "kernel driver", []
    for node in machine.render_nodes():
        device = machine.root / "sys/class/drm" / node.name / "device"
        vendor = device / "vendor"
        if vendor.is_file() and vendor.read_text().strip() == INTEL:
            driver = device / "driver"
            drivers.append(driver.resolve().name if driver.is_symlink() else "none")
    if not drivers:
        advice = "Check `lspci -nn | grep -i -e vga -e display` on the machine."
        return fail(name, "no render node of an Intel GPU", advice)
    if unknown := ", ".join(sorted(set(drivers) - {"xe", "i915"})):
        return fail(name, f"{unknown} for an Intel GPU", "Bind it to xe (or i915) again.")
    return ok(name, ", ".join(drivers))


def check_runtime(machine: Machine) -> Check:
    """Check the oneAPI runtime in this environment: Level Zero's loader and driver, SYCL."""
    name = "oneAPI runtime"
    sycl = next(filter(machine.loads, SYCL), None)
    absent = [library for library in (LOADER, DRIVER) if not machine.loads(library)]
    absent += [] if sycl else [SYCL[0]]
    if absent:
        return fail(
            name,
            f"{', '.join(absent)} can't be loaded",
            "Start in vLLM's image for Intel GPUs, or install Intel's compute runtime and the "
            "packages intel-sycl-rt and intel-cmplr-lib-rt that its vLLM asks for.",
        )
    return ok(name, f"{LOADER}, {DRIVER}, {sycl}")


def check_torch(facts: TorchFacts, settings: Settings) -> Check:
    """Check that PyTorch sees enough Intel GPUs."""
    name = "PyTorch's devices"
    if not facts.gpus:
        return fail(
            name,
            f"torch {facts.version} sees no Intel GPU",
            "If it does not end in +xpu, another build was installed over vLLM's; else see the "
            "checks of nodes, driver and runtime.",
        )
    gpus = ", ".join(f"{gpu} ({size / 2**30:.0f} GiB)" for gpu, size in facts.gpus)
    if len(facts.gpus) < settings.devices:
        names = ("tensor_parallel", "pipeline_parallel", "data_parallel")
        sizes = " x ".join(f"{n}={size}" for n in names if (size := getattr(settings, n)) > 1)
        state = f"{len(facts.gpus)} for {sizes}: {gpus}"
        return fail(name, state, "Lower that, pass more devices, or widen ZE_AFFINITY_MASK.")
    return ok(name, gpus)


def check_handles(machine: Machine) -> Check:
    """Check that processes of several GPUs may take each other's handles of device memory."""
    name = "memory handles"
    if not (refusal := machine.refusal()):
        return ok(name, "processes may take them of each other (pidfd_getfd)")
    return warn(
        name,
        f"pidfd_getfd of another process: {refusal}",
        "oneCCL, by which GPUs of one engine work together, is known to hang or fail then. Give "
        "the container SYS_PTRACE: COMPOSE_FILE=compose.yaml:docker/several-cards.yaml in .env, "
        "gpu.sysPtrace in the chart. Outside of containers look at kernel.yama.ptrace_scope.",
    )


def check_copy_engine(machine: Machine) -> Check:
    """Check that an Arc Pro B70 copies in the way in which its owners saw it last."""
    name, setting = "copy engine", machine.environ.get(NO_COPY_ENGINE)
    cards = (machine.root / "sys/class/drm" / node.name for node in machine.render_nodes())
    files = [card / "device/device" for card in cards]
    if setting or B70 not in [file.read_text().strip() for file in files if file.is_file()]:
        return ok(name, f"{NO_COPY_ENGINE}={setting}" if setting else "no Arc Pro B70")
    return warn(
        name,
        f"an Arc Pro B70 without {NO_COPY_ENGINE}",
        "Owners saw copies to the GPU hang while its copy engine was reset, and no longer with "
        "that variable at 1 (vllm#41663). Set it to 1, or to 0 if yours does not hang.",
    )
