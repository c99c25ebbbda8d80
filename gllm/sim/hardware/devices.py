"""Devices by their data sheets: peak rates and memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpec:
    """Peak rates from its data sheet: dense bf16 FLOP/s, bytes/s, bytes."""

    flops: float
    bandwidth: float
    memory: float


DEVICES = {
    "L20": DeviceSpec(119.5e12, 864e9, 48e9),
    "A100-40G": DeviceSpec(312e12, 1555e9, 40e9),
    "A100-80G": DeviceSpec(312e12, 2039e9, 80e9),
    "A800-80G": DeviceSpec(312e12, 2039e9, 80e9),
    "RTX4090": DeviceSpec(165e12, 1008e9, 24e9),
    "H200": DeviceSpec(989e12, 4800e9, 141e9),
}
"""Data sheets; of the RTX 4090 the fp16 rate with fp32 accumulation."""
