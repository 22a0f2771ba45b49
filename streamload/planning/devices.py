"""Which device a target goes to: one for all, or by module prefix."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.planning.records import Targets


def device_of(name: str, device: str | Mapping[str, str]) -> str:
    """The device of a target: that of the longest prefix that fits, ``""`` fits all."""
    if isinstance(device, str):
        return device
    head = name
    while head:
        if head in device:
            return device[head]
        head = head.rpartition(".")[0]
    return device.get("", "cpu")


def device_problems(targets: Targets, device: str | Mapping[str, str]) -> list[str]:
    """What is wrong with a device map: names it does not cover, modules there are not, ties apart.

    Whether a device exists is for the caller to know; this is pure.
    """
    if isinstance(device, str):
        return []
    problems: list[str] = []
    heads = {"": True}
    for name in targets:
        head = name
        while head:
            heads[head] = True
            head = head.rpartition(".")[0]
    problems += [
        f"the device map names {h!r}, which the module has not" for h in device if h not in heads
    ]
    if "" not in device:
        problems += [
            f"the device map has no entry for {name!r}"
            for name in targets
            if not any(name == h or name.startswith(h + ".") for h in device)
        ]
    for spec in targets.specs:
        places = {device_of(name, device) for name in spec.names}
        if len(places) > 1:
            problems.append(
                f"{' and '.join(map(repr, spec.names))} are one tensor, but the device map puts "
                f"them on {' and '.join(sorted(places))}"
            )
    return problems
