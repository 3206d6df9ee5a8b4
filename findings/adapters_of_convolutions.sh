#!/usr/bin/env bash
# peft: an OFT adapter of a 3x3 convolution changes the model before it is trained, and is another one once it is merged.
#
# Versions: peft 0.21.2, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: nn.Conv2d(4, 8, 3), 9x9 pictures; also with padding_mode="reflect", with stride=3, and of 1x1; fresh adapters, and trained ones.
# Expected: a fresh adapter that changes nothing (OFT's init_weights=True is "identity"), and a merged one that computes what it did before.
# Seen on 2026-11-30, difference of outputs, of the largest one, without an error or a warning:
#     OFT: fresh 3.32 (3x3), 2.25 (stride 3, as patches are embedded), 0 (1x1); merged 1.11, 0.86, 0
#       It turns the 3x3 windows around each pixel and adds them up again: a pixel counts once for each window that it is in, 9 times.
#     padding_mode="reflect": fresh BOFT and HRA 0.45; merged BOFT 0.51, HRA 0.58, LoRA 0.23, LoKr 0.09, LoHa 0.04; IA3 0
#       Their own convolution pads with zeros. LoRA's has no dilation either: with padding="same" and dilation=2, merged 0.48.
#   What is evaluated after training is not what is merged and shipped. Transformers' vision models and diffusion models have such layers.
# A way round: target linear layers and 1x1 convolutions; for padded ones F.pad in front of a convolution without padding.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/convolutions.py" <<'PYTHON'
import logging
import warnings

import peft
import torch

warnings.simplefilter("ignore")
logging.disable()
layers = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "stride 3": {"kernel_size": 3, "stride": 3},
    "1x1": {"kernel_size": 1},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
}
methods = {"OFT": {"oft_block_size": 4}, "BOFT": {"boft_block_size": 4}, "HRA": {}, "Lora": {}, "LoHa": {}, "LoKr": {}}
methods["IA3"] = {"feedforward_modules": []}


def differences(name, options, layer):
    """Of a fresh adapter to none, and of a trained one merged to the same one before."""
    torch.manual_seed(0)
    x, model = torch.randn(3, 4, 9, 9), torch.nn.Sequential(torch.nn.Conv2d(4, 8, **layer))
    none = model(x)
    model = peft.get_peft_model(model, getattr(peft, f"{name}Config")(target_modules=["0"], **options)).eval()
    fresh = model(x)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    trained = model(x)
    merged = model.merge_and_unload()(x)
    return [round(((a - b).abs().max() / b.abs().max()).item(), 2) for a, b in ((fresh, none), (merged, trained))]


with torch.no_grad():
    seen = {name: [differences(name, options, layer) for layer in layers.values()] for name, options in methods.items()}
    dilated = differences("Lora", {}, {"kernel_size": 3, "padding": "same", "dilation": 2})
for name, found in seen.items():
    print(f"{name}, of {', '.join(layers)}: fresh", *(fresh for fresh, _ in found), "merged", *(merged for _, merged in found))
print("Lora, dilated: fresh, merged", *dilated)
expected = {"OFT": [(3.32, 1.11), (2.25, 0.86), (0, 0), (3.32, 1.11)], "BOFT": [(0, 0)] * 3 + [(0.45, 0.51)], "IA3": [(0, 0)] * 4}
expected |= {name: [(0, 0)] * 3 + [last] for name, last in {"HRA": (0.45, 0.58), "Lora": (0, 0.23), "LoHa": (0, 0.04), "LoKr": (0, 0.09)}.items()}
if dilated != [0, 0.48]:
    raise SystemExit("changed")
if any(abs(a - b) > 0.02 * b for name, found in seen.items() for ours, must in zip(found, expected[name]) for a, b in zip(ours, must)):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/convolutions.py"
