"""Cuts a GPT-NeoX into raw partitions the way its tensor parallelism does."""

import json

import torch

ROW_PARALLEL = ("attention.dense", "mlp.dense_4h_to_h")
COLUMN_PARALLEL = ("attention.query_key_value", "mlp.dense_h_to_4h")
NORMS = ("input_layernorm", "post_attention_layernorm")


def whole(state):
    """Published names → {(file number, key): tensor} before the cut."""
    layers = 1 + max(int(n.split(".")[2]) for n in state if n.startswith("gpt_neox.layers."))
    found = {}
    for name, tensor in state.items():
        parts = name.removeprefix("gpt_neox.").split(".")
        if parts[0] == "embed_in":
            found[0, "word_embeddings.weight"] = tensor
        elif parts[0] == "final_layer_norm":
            found[layers + 3, f"norm.{parts[1]}"] = tensor
        elif parts[0] in ("embed_out", "lm_head"):
            found[layers + 4, "final_linear.weight"] = tensor
        elif parts[0] == "layers":
            found[int(parts[1]) + 2, ".".join(parts[2:])] = tensor
    return found


def part_of(key, tensor, rank, ranks, *, shares_bias):
    """What one rank holds of a tensor."""
    module, _, end = key.rpartition(".")
    if module in ROW_PARALLEL and end == "weight":
        return tensor.chunk(ranks, 1)[rank].clone()
    if module in ROW_PARALLEL:
        return tensor / ranks if shares_bias else tensor.clone()
    if module in (*COLUMN_PARALLEL, "word_embeddings", "final_linear"):
        return tensor.chunk(ranks, 0)[rank].clone()
    return tensor.clone()


def cut(state, ranks, *, shares_bias=True):
    """{(file number, rank): {key: tensor}}"""
    files = {}
    for (number, key), tensor in whole(state).items():
        for rank in range(ranks):
            part = part_of(key, tensor, rank, ranks, shares_bias=shares_bias)
            files.setdefault((number, rank), {})[key] = part
    for (_, _), tensors in files.items():
        if "attention.dense.bias" in tensors:
            tensors["attention.rotary_emb.inv_freq"] = torch.tensor([1.0, 0.01])
    return files


def named(files):
    """The names the source gives them."""
    return {
        f"layer_{number}.model_{rank}.{key}": tensor
        for (number, rank), tensors in sorted(files.items())
        for key, tensor in tensors.items()
    }


def write(folder, files, config):
    folder.mkdir(parents=True, exist_ok=True)
    for (number, rank), tensors in files.items():
        torch.save(tensors, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
