#!/usr/bin/env bash
# peft: adapter_names, one adapter for each row of a batch, is ignored by all but three methods; each row gets the active adapter.
#
# Versions: peft 0.21.2, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a linear layer with two trained adapters, and a batch of three rows: model(x, adapter_names=["default", "second", "__base__"]).
# Expected: each row as its adapter alone computes it, as LoRA, GLoRA and RoAd do; or an error, as those three raise for a name that no
#   adapter has, for training mode, and where an adapter is merged.
# Seen on 2026-11-30, without an error or a warning:
#     LoRA, GLoRA, RoAd: the three rows are right, and "no_such_adapter" is refused
#     17 other methods (IA3, LoHa, LoKr, OFT, BOFT, VeRA, HRA, MiSS, FourierFT, DeLoRA, ...): all three rows are the active adapter's, and
#       "no_such_adapter" is taken
#   PeftModel.forward takes the argument away before it calls the model, whatever the method, and a method without mixed batches gives it to
#   nobody. A server that sends the requests of several customers through one batch answers all of them with one customer's adapter, and an
#   evaluation against "__base__" compares an adapter with itself.
# A way round: one batch for each adapter, behind model.set_adapter(name).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/rows.py" <<'PYTHON'
import logging
import warnings

import peft
import torch

warnings.simplefilter("ignore")
logging.disable()
mixing = {"Lora": {}, "Glora": {}, "Road": {}}
others = {
    **{"IA3": {"feedforward_modules": []}, "LoHa": {}, "LoKr": {}, "OFT": {}, "BOFT": {}, "Vera": {}, "HRA": {}, "Miss": {"r": 4}},
    **{"FourierFT": {"n_frequency": 99}, "Delora": {}, "VBLoRA": {"vector_length": 4}, "RandLora": {}, "C3A": {"block_size": 8}},
    **{"Shira": {"r": 4}, "WaveFT": {"n_frequency": 99}, "Gralora": {}, "Hira": {}},
}


def rows(name, options):
    """What the three rows of a mixed batch equal, and whether a name that no adapter has is refused."""
    torch.manual_seed(0)
    x, layer = torch.randn(3, 64), torch.nn.Sequential(torch.nn.Linear(64, 64))
    alone = {"__base__": layer(x)}
    config = getattr(peft, f"{name}Config")(target_modules=["0"], **options)
    model = peft.get_peft_model(layer, config).eval()
    model.add_adapter("second", config)
    for adapter in ("second", "default"):
        model.set_adapter(adapter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    for adapter in ("second", "default"):
        model.set_adapter(adapter)
        alone[adapter] = model(x)
    found = model(x, adapter_names=["default", "second", "__base__"])
    equal = [next((by for by in alone if torch.allclose(found[i], alone[by][i], atol=1e-5)), "none") for i in range(3)]
    try:
        model(x, adapter_names=["no_such_adapter"] * 3)
    except ValueError:
        return equal, "refused"
    return equal, "taken"


with torch.no_grad():
    seen = {name: rows(name, options) for name, options in {**mixing, **others}.items()}
for name, (equal, unknown) in seen.items():
    print(f"{name}: rows of {', '.join(equal)}; no_such_adapter is {unknown}")
right, ignored = (["default", "second", "__base__"], "refused"), (["default"] * 3, "taken")
if any(found != (right if name in mixing else ignored) for name, found in seen.items()):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/rows.py"
