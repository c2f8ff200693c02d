"""Which adapters the demo serves."""

from __future__ import annotations

from pathlib import Path

from loramux.errors import ConfigError

# Adapters are data, 27 MB, and no part of the installed package: they are there in a checkout.
_IN_A_CHECKOUT = Path(__file__).parents[3] / "examples" / "adapters"


def default_adapters_folder() -> Path:
    """``examples/adapters`` of the checkout this runs from. Raises ConfigError elsewhere."""
    if not _IN_A_CHECKOUT.is_dir():
        raise ConfigError(
            "the demo's adapters are not part of the installed package: name a folder of adapters "
            "for SmolLM2-135M-Instruct with --adapters, such as examples/adapters of a checkout"
        )
    return _IN_A_CHECKOUT


def find_adapters(folder: Path) -> dict[str, str]:
    """Name and source of each PEFT folder right inside ``folder``, by name. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"--adapters {folder}: there is no such folder")
    found = {
        config.parent.name: str(config.parent) for config in folder.glob("*/adapter_config.json")
    }
    if not found:
        raise ConfigError(f"--adapters {folder}: no folder in it holds an adapter_config.json")
    return dict(sorted(found.items()))
