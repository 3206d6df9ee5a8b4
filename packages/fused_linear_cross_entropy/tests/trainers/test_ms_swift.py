"""A model that ms-swift fine-tunes, with our loss inside."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("swift.model.register", reason="ms-swift is not installed")

PLUGIN = """
from npu_fused_linear_cross_entropy.integrations import ms_swift

ms_swift.register()
"""
PROGRAM = """
import json, sys
from pathlib import Path
import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
words = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", *(f"w{number}" for number in range(50))]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokens = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(folder)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
torch.manual_seed(0)
config = transformers.Qwen3Config(**sizes, num_hidden_layers=1, vocab_size=64)
transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
rows = [
    {"messages": [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": " ".join(f"w{(7 * row + word) % 50}" for word in range(9))},
    ]}
    for row in range(8)
]
(folder / "rows.jsonl").write_text("\\n".join(map(json.dumps, rows)))

from swift.pipelines import sft_main

losses = {}
for plugins in ([], [str(folder / "plugin.py")]):
    output = folder / f"output{len(plugins)}"
    options = {
        "model": folder, "model_type": "qwen3", "template": "qwen3", "dataset": folder / "rows.jsonl", "tuner_type": "full",
        "torch_dtype": "float32", "max_steps": 2, "logging_steps": 1, "output_dir": output, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "save_strategy": "no", "eval_strategy": "no", "split_dataset_ratio": 0,
        "report_to": "none", "use_hf": "true", "dataloader_num_workers": 0, "add_version": "false",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    sft_main([*given, *(["--external_plugins", *plugins] if plugins else [])])
    lines = [json.loads(line) for line in (output / "logging.jsonl").read_text().splitlines()]
    losses[len(plugins)] = [float(line[name]) for line in lines for name in ("loss", "grad_norm") if name in line]
(folder / "losses.json").write_text(json.dumps(losses))
"""


def test_fine_tuning_with_a_plugin_has_the_losses_that_it_had(tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "npu_fused_linear_cross_entropy: 1 module replaced" in done.stdout
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses["1"]) == 4
    assert losses["1"] == pytest.approx(losses["0"], rel=1e-3)
