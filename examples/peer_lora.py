"""A small transformer whose LoRA adapters, and nothing else, travel among real peers.

The base model is made here from a seed, so that nothing is downloaded; every member makes the same one. Only
parameters that are trained are written into the network's initial model, so only they are pulled: here 14 %
of a very small model, of a real one often less than 1 %.

Once, by the founder:

    python examples/peer_lora.py --initial adapters.safetensors
    rpel network new --peers 4 --byzantine 1 --rounds 20 --period 5 --task peer_lora:loop \
        --model adapters.safetensors

Then each member, after `rpel peer init --task peer_lora:loop`:

    python examples/peer_lora.py clinic-1/peer.toml

Needs the packages transformers and peft.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import rpel
from rpel.integrations.trainers import transformers_callback

TOKENS = 16


def make_model() -> Any:
    """A GPT of two layers with adapters in its attention, the same for everybody."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    shape.initializer_range, shape.resid_pdrop, shape.embd_pdrop, shape.attn_pdrop = 0.2, 0.0, 0.0, 0.0
    adapters = LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True
    )
    base = GPT2LMHeadModel(shape)
    return get_peft_model(base, adapters)


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What travels: the parameters that require a gradient, by name."""
    return {
        name: value.detach().contiguous() for name, value in model.named_parameters() if value.requires_grad
    }


def my_texts(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Stands for your own data: sequences that count upwards by a step that differs."""
    start, step = torch.randint(TOKENS, (count, 1)), torch.randint(1, 3, (count, 1))
    tokens = (start + step * torch.arange(16)) % TOKENS
    return [{"input_ids": row, "labels": row} for row in tokens]


def loss(model: Any) -> float:
    """The mean loss on fresh sequences."""
    texts = my_texts(64)
    batch = {key: torch.stack([text[key] for text in texts]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        return float(model(**batch).loss)


def train(path: Path, steps: int = 1000) -> tuple[float, float]:
    """Take part to the network's last round; the loss before and after."""
    from transformers import Trainer, TrainingArguments

    model = make_model()
    before = loss(model)
    arguments = TrainingArguments(
        output_dir=str(path.parent / "trainer"),
        max_steps=steps,  # training ends with the network's last round
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    with rpel.Peer(path) as peer:
        Trainer(
            model=model, args=arguments, train_dataset=my_texts(), callbacks=[transformers_callback(peer)]
        ).train()
    return before, loss(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="peer.toml")
    parser.add_argument(
        "--initial", type=Path, help="write the adapters that all members begin with, and leave"
    )
    given = parser.parse_args()
    if given.initial:
        save_file(trained(make_model()), given.initial)
    elif given.config:
        print("loss {:.3f} before, {:.3f} after".format(*train(given.config)))
    else:
        parser.error("give a peer.toml, or --initial FILE")


if __name__ == "__main__":
    main()
