"""The batch of a step, which is the same whatever the number of processes."""

from __future__ import annotations

import logging

from transformers import TrainingArguments

from aero_compile.errors import InputError
from aero_compile.training.setup.arguments import spread_by

logger = logging.getLogger("aero_compile.retrain")


def divide_batch(size: int | None, arguments: TrainingArguments) -> None:
    """Set how many blocks a device takes at a time, and in how many forward passes, so that a step has `size` blocks.

    The blocks of a device at a time are at most those of `arguments`. None leaves everything as it is.

    Raises:
        InputError: the devices, or the blocks that one takes at a time, do not divide it.
    """
    if size is None:
        return
    devices = arguments.world_size * max(1, arguments.n_gpu)
    each, passes = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    flag = f"--global-batch-size {size}"
    if each * passes * devices == size:
        return
    if size % devices:
        raise InputError(f"{flag} cannot be divided over {devices} devices: take a number of devices that divides it")
    share = size // devices
    most = min(each, share)
    if passes != 1:
        raise InputError(
            f"{flag} is not --per-device-train-batch-size {each} × --gradient-accumulation-steps {passes} × {devices} "
            "devices: leave --gradient-accumulation-steps out, or give the --global-batch-size that you want"
        )
    if share % most:
        fitting = ", ".join(str(n) for n in range(1, most + 1) if share % n == 0)
        raise InputError(
            f"{flag} is {share} blocks a device, which --per-device-train-batch-size {each} does not divide: take one "
            f"of {fitting}"
        )
    if spread_by(arguments) == "deepspeed":  # which has read its configuration already
        raise InputError(
            f"{flag} with DeepSpeed: give --per-device-train-batch-size {most} --gradient-accumulation-steps "
            f"{share // most}"
        )
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = most, share // most
    logger.info("a step has %d blocks: %d devices × %d forward passes × %d", size, devices, share // most, most)
