"""Write the LoRA adapters of a member in the files of PEFT."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from plateaux.integrations.peft_adapters import adapter_files
from plateaux.storage.atomic import write_atomic


def save_adapter(module: nn.Module, folder: str | Path, *, base_model: str = "") -> None:
    """Write the adapters and the fully trained modules of one member, for `peft.PeftModel.from_pretrained`.

    Args:
        module: A network with adapters, such as a member of a run with `[model.lora]`.
        folder: The folder to write to.
        base_model: Name or path of the base model, which PEFT reads from the configuration.
    """
    for name, content in adapter_files(module, base_model=base_model).items():
        write_atomic(Path(folder) / name, content)
