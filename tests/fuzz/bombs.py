"""Small files that stand for large ones: each is answered in the time and memory of its size.

``python -m tests.fuzz.bombs`` prints a JSON line: of each bomb its size, time and answer.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator

from tests.fuzz.distcp_bombs import (
    metadata_of_long_names,
    metadata_of_many_pieces,
    metadata_of_nothing_but_tables,
    metadata_of_one_list_of_pieces,
    metadata_of_one_place,
)
from tests.fuzz.judge import at_most, limit_bytes, limit_s

__all__ = ["BOMBS", "main"]

# --- pickles -----------------------------------------------------------------------------------

_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_ORDERED = b"ccollections\nOrderedDict\n"


def text(value: str | bytes) -> bytes:
    """An opcode that pushes text."""
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def put(number: int) -> bytes:
    """An opcode that notes the top of the stack."""
    return b"r" + struct.pack("<I", number)


def get(number: int) -> bytes:
    """An opcode that pushes what was noted."""
    return b"j" + struct.pack("<I", number)


def tensor(key: str = "0", *, count: int = 1, shape: bytes = b"K\1\x85", steps: bytes = b"K\1\x85"):
    """A tensor over a storage of ``count`` float32."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    storage += b"J" + struct.pack("<i", count) + b"tQ"
    return _REBUILD + b"(" + storage + b"K\0" + shape + steps + b"\x89" + _ORDERED + b")RtR"


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def torch_zip(
    pickle: bytes, records: dict[str, bytes] | None = None, *, deflated: bool = False
) -> bytes:
    """A file as torch.save writes it."""
    made = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", method) as archive:
        archive.writestr("m/data.pkl", pickle)
        archive.writestr("m/version", "3\n")
        for name, data in (records or {"data/0": b"\0" * 4}).items():
            archive.writestr(f"m/{name}", data)
    return made.getvalue()


def state(items: bytes) -> bytes:
    return pickled(b"}(" + items + b"u")


def one_long_key_over_many_tensors() -> bytes:
    long = text("k" * 10_000_000)
    inner = b"".join(text(f"t{i}") + get(2) for i in range(1000))
    return torch_zip(state(text("t") + tensor() + put(2) + long + b"}(" + inner + b"u"))


def keys_that_are_joined_in_levels() -> bytes:
    """A name of 3,000 characters at each of five levels, ten tables in each, all the same."""
    body, noted = tensor() + put(1), 1
    for level in range(5):
        keys = [text(f"{level}{at}" + "k" * 9000) + get(noted) for at in range(10)]
        body += b"0}(" + b"".join(keys) + b"u" + put(noted + 1)
        noted += 1
    return torch_zip(pickled(body))


def aliases_of_tables() -> bytes:
    """A table of 30 tensors, in a table 30 times, and that again."""
    body = tensor() + put(1)
    for level in range(4):
        keys = b"".join(text(f"{level}.{i}") + get(level + 1) for i in range(30))
        body += b"0}(" + keys + b"u" + put(level + 2)
    return torch_zip(pickled(body))


def many_names_of_one_tensor() -> bytes:
    return torch_zip(
        state(
            text("t") + tensor() + put(1) + b"".join(text(f"{i}") + get(1) for i in range(90_000))
        )
    )


def integers_of_one_hash() -> bytes:
    keys = (i * ((1 << 61) - 1) for i in range(1 << 24, (1 << 24) + 40_000))
    items = b"".join(b"\x8a\x0c" + key.to_bytes(12, "little") + b"N" for key in keys)
    return torch_zip(state(text("t") + tensor() + text("o") + b"}(" + items + b"u"))


def tuples_of_one_hash() -> bytes:
    keys = (i * ((1 << 61) - 1) for i in range(1 << 24, (1 << 24) + 30_000))
    items = b"".join(b"\x8a\x0c" + key.to_bytes(12, "little") + b"K\1\x86N" for key in keys)
    return torch_zip(state(text("t") + tensor() + text("o") + b"}(" + items + b"u"))


def marks() -> bytes:
    return torch_zip(pickled(b"(" * 6_000_000))


def empty_lists() -> bytes:
    return torch_zip(pickled(b"(" + b"]" * 6_000_000 + b"l"))


def noted_numbers() -> bytes:
    return torch_zip(pickled(b"K\0" + b"\x94" * 5_000_000))


def short_long_integers() -> bytes:
    return torch_zip(pickled(b"(" + b"\x8a\2\1\2" * 1_500_000 + b"t"))


def tables_of_dimensions() -> bytes:
    """Tensors of 64 dimensions, made from the same arguments again and again."""
    sizes = b"(" + b"K\1" * 64 + b"t"
    arguments = tensor(shape=sizes, steps=sizes).partition(_REBUILD)[2][:-1]
    body = _REBUILD + put(1) + b"0" + arguments + put(2) + b"0" + b"h\1h\2R0" * 20_000
    return torch_zip(pickled(body + b"N"))


def names_that_are_not_known() -> bytes:
    names = b"".join(b"cm%d\nn%d\n" % (i, i) for i in range(60_000))
    return torch_zip(state(text("t") + tensor() + text("o") + b"(" + names + b"t"))


def steps_that_do_nothing() -> bytes:
    return torch_zip(pickled(b"N0" * 10_000_000 + b"N"))


def calls_of_one_function() -> bytes:
    body = _REBUILD + put(1) + b"0" + tensor() + b"0" + _tuple_of_arguments() + put(2) + b"0"
    return torch_zip(pickled(body + (b"h\1h\2R0") * 500_000 + b"N"))


def _tuple_of_arguments() -> bytes:
    return tensor().partition(_REBUILD)[2][:-1]


def long_keys_that_are_compared() -> bytes:
    """Two equal keys of a megabyte, one set over the other again and again."""
    key = text("k" * 1_000_000)
    body = key + put(1) + key + put(2) + b"00}" + get(1) + b"Ns" + (get(2) + b"Ns") * 100_000
    return torch_zip(pickled(body))


def long_arguments_again_and_again() -> bytes:
    arguments = b"(" + b"N" * 500_000 + b"t" + put(1)
    return torch_zip(
        pickled(
            b"cx\ny\n" + put(2) + arguments + b"00" + (get(2) + get(1) + b"}\x920") * 20_000 + b"N"
        )
    )


def an_object_that_is_searched_in_many_places() -> bytes:
    big = b"cx\ny\n)R(" + b"]" * 20_000 + b"e" + put(1)
    items = b"".join(text(f"{i}") + get(1) for i in range(20_000))
    return torch_zip(state(text("t") + tensor() + text("o") + big + items))


def long_names_of_globals() -> bytes:
    name = text("m" * 500_000) + put(1)
    return torch_zip(pickled(name + b"0" + (get(1) * 2 + b"\x930") * 50_000 + b"N"))


def an_expanded_tensor() -> bytes:
    shape = b"J" + struct.pack("<i", 1 << 30) + b"\x85"
    return torch_zip(state(text("t") + tensor(shape=shape, steps=b"K\0\x85")))


def one_storage_under_many_names() -> bytes:
    shape = b"J" + struct.pack("<i", 1 << 18) + b"\x85"
    body = text("t") + tensor(shape=shape, count=1 << 18) + put(1)
    body += b"".join(text(f"{i}") + get(1) for i in range(1000))
    return torch_zip(state(body), {"data/0": b"\0" * (4 << 18)})


def legacy_storages_without_end() -> bytes:
    header = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\0NtQ"
    )
    one = _REBUILD + b"(" + storage + b"K\0K\0\x85K\1\x85\x89" + _ORDERED + b")RtR"
    keys = b"](" + text("0") + b"q\0" + b"h\0" * 400_000 + b"e"
    return header + state(text("t") + one) + pickled(keys) + b"\0" * 8 * 400_001


# --- zip archives ------------------------------------------------------------------------------


def a_pickle_of_zeros() -> bytes:
    return torch_zip(pickled(b"N0" * 30_000_000 + b"N"), deflated=True)


def records_of_zeros() -> bytes:
    """Records beside the weights that unpack to 60 MB each."""
    records = {f"extra/{i}": b"\0" * 60_000_000 for i in range(8)}
    return torch_zip(state(text("t") + tensor()), records | {"data/0": b"\0" * 4}, deflated=True)


def a_storage_of_zeros() -> bytes:
    shape = b"J" + struct.pack("<i", 1 << 26) + b"\x85"
    items = text("t") + tensor(shape=shape, count=1 << 26)
    return torch_zip(state(items), {"data/0": b"\0" * (4 << 26)}, deflated=True)


def views_of_a_storage_of_zeros() -> bytes:
    items = b"".join(text(f"{i}") + tensor(count=1 << 22) for i in range(500))
    return torch_zip(state(items), {"data/0": b"\0" * (4 << 22)}, deflated=True)


def many_records() -> bytes:
    return torch_zip(state(text("t") + tensor()), {"data/0": b"\0" * 4} | _empty(150_000))


def _empty(count: int) -> dict[str, bytes]:
    return {f"x{i}": b"" for i in range(count)}


def records_over_each_other() -> bytes:
    """Compressed records whose data is one and the same megabyte."""
    plain = bytearray(torch_zip(state(text("t") + tensor())))
    end = plain.rfind(b"PK\5\6")
    count, size, start = struct.unpack_from("<HII", plain, end + 10)
    directory = bytes(plain[start : start + size])
    packed = zlib.compress(os.urandom(1 << 20))[2:-4]
    local, entries = b"", b""
    names = [b"m/x%05d" % i for i in range(3000)]
    for name in names:
        fields = (20, 0, 8, 0, 33, 0, len(packed), 1 << 20, len(name), 0)
        entries += (
            b"PK\1\2"
            + struct.pack("<HHHHHHIIIHHHHHII", 20, *fields, 0, 0, 0, 0, start + len(local))
            + name
        )
        local += b"PK\3\4" + struct.pack("<HHHHHIIIHH", *fields) + name
    body = bytes(plain[:start]) + local + packed + packed
    total = count + len(names)
    tail = struct.pack(
        "<4sHHHHIIH", b"PK\5\6", 0, 0, total, total, size + len(entries), len(body), 0
    )
    return body + directory + entries + tail


# --- JSON --------------------------------------------------------------------------------------


def header(text: bytes, data: bytes = b"") -> bytes:
    """A safetensors file."""
    return struct.pack("<Q", len(text)) + text + data


def _entry(name: str, shape: str = "0", stop: int = 0) -> str:
    return f'"{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,{stop}]}}'


def a_header_of_empty_lists() -> bytes:
    return header(b'{"x":[' + b"[]," * 4_000_000 + b"[]]}")


def a_header_of_short_keys() -> bytes:
    return header(("{" + ",".join(f'"{i:x}":0' for i in range(800_000)) + "}").encode())


def a_header_of_empty_tensors() -> bytes:
    return header(("{" + ",".join(_entry(f"{i:x}") for i in range(100_000)) + "}").encode())


def a_scale_under_dots() -> bytes:
    names = [f"{i}" + "." * 4000 + "scale" for i in range(100)] + ["." * 500_000 + "scale"]
    return header(("{" + ",".join(_entry(name) for name in names) + "}").encode())


def a_huge_number() -> bytes:
    return header(b'{"w":{"dtype":"U8","shape":[' + b"9" * 3_000_000 + b'],"data_offsets":[0,0]}}')


def a_header_of_quotes() -> bytes:
    return header(b"{" + b'["]' * 3_000_000)


def the_same_key_twice() -> bytes:
    key = b'"' + b"k" * 4_000_000 + b'":0'
    return header(b"{" + key + b"," + key + b"}")


def an_index_of_many_files() -> bytes:
    return json.dumps({"weight_map": {f"{i}": f"f{i}" for i in range(150_000)}}).encode()


def an_index_of_long_names() -> bytes:
    weights = {f"{i}": "f" * 300_000 + f"{i}" for i in range(20)}
    return json.dumps({"weight_map": weights}).encode()


def a_configuration_of_empty_objects() -> bytes:
    return b'{"model_type":"gpt2","x":[' + b"{}," * 4_000_000 + b"{}]}"


def a_configuration_with_a_long_type() -> bytes:
    return json.dumps({"model_type": "\x1b" * 2_000_000}).encode()


def a_configuration_of_many_layers() -> bytes:
    sizes = {"vocab_size": 10**12, "n_positions": 8, "n_embd": 8, "n_head": 1, "n_layer": 10**9}
    return json.dumps({"model_type": "gpt2", **sizes}).encode()


# --- YAML --------------------------------------------------------------------------------------


def yaml_aliases() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 12):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")
    return "\n".join([*lines, "num-layers: *a11", "hidden-size: 8"]).encode()


def yaml_aliases_that_are_compared() -> bytes:
    return yaml_aliases().replace(b"num-layers: *a11", b"norm: *a11\nactivation: *a11")


def yaml_in_itself() -> bytes:
    return b"num-layers: &a [*a]\nhidden-size: *a\n"


def yaml_depth() -> bytes:
    return b"num-layers: " + b"[" * 20_000


def yaml_base_60() -> bytes:
    return b"num-layers: 1" + b":59" * 7_000 + b"\n"


def yaml_digits() -> bytes:
    return b"num-layers: " + b"9" * 20_000 + b"\n"


def yaml_chosen_integers() -> bytes:
    keys = (i * ((1 << 61) - 1) for i in range(1, 900))
    return b"".join(b"%d: x\n" % key for key in keys) + b"num-layers: 2\n"


def yaml_of_commas() -> bytes:
    return b"num-layers: [" + b"a," * 11_000 + b"]"


def yaml_merges() -> bytes:
    return b"a: &a {num-layers: 2}\n<<: [" + b"*a," * 7_000 + b"]\n"


def yaml_of_ten_megabytes() -> bytes:
    return b"num-layers: 2\n" + b"# nothing\n" * 1_000_000


# --- tokenizers --------------------------------------------------------------------------------


def tokenizer(**changes: object) -> bytes:
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    parts |= {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    parts["model"] = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return json.dumps({**parts, **changes}).encode()


def _split(pattern: str) -> dict[str, object]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def a_pattern_that_explodes() -> bytes:
    return tokenizer(pre_tokenizer=_split(r"(a+)+$"))


def a_pattern_that_is_tried_everywhere() -> bytes:
    return tokenizer(pre_tokenizer=_split(r"(a?){25}a{25}c|(a*a*a*a*)d"))


def a_pattern_of_many_repetitions() -> bytes:
    return tokenizer(pre_tokenizer=_split("(" * 5 + "a" + "{900}){900}" * 5))


def a_normalizer_that_explodes() -> bytes:
    replace = {"type": "Replace", "pattern": {"Regex": r"(a|aa)+$"}, "content": "a" * 1000}
    return tokenizer(normalizer={"type": "Sequence", "normalizers": [replace] * 50})


def a_normalizer_that_multiplies() -> bytes:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    return tokenizer(normalizer={"type": "Sequence", "normalizers": [replace] * 20})


def a_vocabulary_of_long_words() -> bytes:
    words = [[f"{i:05d}" * 60, -1.0] for i in range(20_000)]
    return tokenizer(model={"type": "Unigram", "unk_id": 0, "vocab": words, "byte_fallback": False})


def a_tokenizer_that_is_deep() -> bytes:
    return tokenizer(model={"type": "BPE"})[:-1] + b',"x":' + b"[" * 100_000


# --- what is done with them --------------------------------------------------------------------

CHECKPOINTS: dict[str, list[Callable[[], bytes]]] = {
    "model.bin": [
        one_long_key_over_many_tensors,
        keys_that_are_joined_in_levels,
        aliases_of_tables,
        many_names_of_one_tensor,
        integers_of_one_hash,
        tuples_of_one_hash,
        marks,
        empty_lists,
        noted_numbers,
        short_long_integers,
        tables_of_dimensions,
        names_that_are_not_known,
        steps_that_do_nothing,
        calls_of_one_function,
        long_keys_that_are_compared,
        long_arguments_again_and_again,
        an_object_that_is_searched_in_many_places,
        long_names_of_globals,
        an_expanded_tensor,
        one_storage_under_many_names,
        legacy_storages_without_end,
        a_pickle_of_zeros,
        records_of_zeros,
        a_storage_of_zeros,
        views_of_a_storage_of_zeros,
        many_records,
        records_over_each_other,
    ],
    "model.safetensors": [
        a_header_of_empty_lists,
        a_header_of_short_keys,
        a_header_of_empty_tensors,
        a_scale_under_dots,
        a_huge_number,
        a_header_of_quotes,
        the_same_key_twice,
    ],
    "model.safetensors.index.json": [an_index_of_many_files, an_index_of_long_names],
    ".metadata": [
        metadata_of_one_list_of_pieces,
        metadata_of_many_pieces,
        metadata_of_one_place,
        metadata_of_long_names,
        metadata_of_nothing_but_tables,
    ],
    "config.json": [
        a_configuration_of_empty_objects,
        a_configuration_with_a_long_type,
        a_configuration_of_many_layers,
    ],
    "configs/x.yml": [
        yaml_aliases,
        yaml_aliases_that_are_compared,
        yaml_in_itself,
        yaml_depth,
        yaml_base_60,
        yaml_digits,
        yaml_chosen_integers,
        yaml_of_commas,
        yaml_merges,
        yaml_of_ten_megabytes,
    ],
    "tokenizer.json": [
        a_pattern_that_explodes,
        a_pattern_that_is_tried_everywhere,
        a_pattern_of_many_repetitions,
        a_normalizer_that_explodes,
        a_normalizer_that_multiplies,
        a_vocabulary_of_long_words,
        a_tokenizer_that_is_deep,
    ],
}
BOMBS = {make.__name__: (name, make) for name, makes in CHECKPOINTS.items() for make in makes}


def _answer(path: str) -> None:
    """What a user does with such a file."""
    import streamload
    from streamload.generation.tokenizer import load_tokenizer
    from streamload.sources.config.beside import adapter_beside
    from streamload.sources.config.generation_settings import generation_settings
    from streamload.sources.config.neox_params import neox_config

    folder, name = os.path.split(path)
    if name == "tokenizer.json":
        found = load_tokenizer(folder)
        found.decode(found.encode("a" * 60 + "b" + "a" * 400))
    elif name == "x.yml":
        spec = streamload.open_checkpoint(os.path.join(_SHAPES, "model.safetensors"))
        neox_config(os.path.dirname(folder), spec.catalog.tensors, blocks=1, ranks=1)
    elif name == "config.json":
        generation_settings(folder, {})
        adapter_beside(folder)
        streamload.load(folder)
    else:
        with streamload.open_checkpoint(path) as source:
            few = len(source.catalog) < 2_000
        if few:
            streamload.load_state_dict(path, workers=1)


_SHAPES = ""
_LOOP_S = 0.06  # a million rounds of a loop, on the machine that the limits were made for


def judge(path: str) -> dict[str, object]:
    """Time and memory of the answer to one file, processes of its own included."""
    import streamload

    size = os.path.getsize(path)
    start_s = _cpu_s()
    with at_most(limit_bytes(size)):
        try:
            _answer(path)
            said = "taken"
        except streamload.StreamloadError as error:
            said = str(error)
            assert said.isprintable()
            assert len(said) < 30_000
        except Exception as error:  # what a test shows
            said = f"foreign {type(error).__name__}: {error}"[:300]
    elapsed_s = _cpu_s() - start_s
    limit = limit_s(size) * _slowness()
    return {"nbytes": size, "elapsed_s": elapsed_s, "limit_s": limit, "said": said[:200]}


def _slowness() -> float:
    """How much longer than on a quiet machine Python takes just now: others may share its cores."""
    start_s = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number & 3
    return max((time.process_time() - start_s) / _LOOP_S, 1.0)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _written(folder: str) -> Iterator[tuple[str, str]]:
    import torch
    from safetensors.torch import save_file

    for title, (name, make) in BOMBS.items():
        path = os.path.join(folder, title, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name in ("config.json", "tokenizer.json"):
            save_file({"x": torch.zeros(1)}, os.path.join(folder, title, "model.safetensors"))
        if name == "config.json":
            for other in ("generation_config.json", "adapter_config.json"):
                with open(os.path.join(folder, title, other), "wb") as file:
                    file.write(make())
        if name == ".metadata":
            torch.save(torch.zeros(1), os.path.join(folder, title, "__0_0.distcp"))
        with open(path, "wb") as file:
            file.write(make())
        yield title, path


def main(arguments: list[str]) -> int:
    global _SHAPES
    import torch
    from safetensors.torch import save_file

    warnings.simplefilter("ignore")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        _SHAPES = folder
        shapes = {
            "layer_4.model_0.norm.weight": (8,),
            "layer_5.model_0.final_linear.weight": (8, 8),
        }
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        save_file(tensors, os.path.join(folder, "model.safetensors"))
        _answer(os.path.join(folder, "model.safetensors"))  # imports, thread stacks
        for title, path in _written(folder):
            if arguments and title not in arguments:
                continue
            for _ in range(3):  # a busy machine is not our slowness: the best of three counts
                result = judge(path)
                if result["elapsed_s"] < result["limit_s"]:  # type: ignore[operator]
                    break
            found[title] = result
            if sys.stderr.isatty() or arguments or os.environ.get("BOMBS"):
                print(title, result, file=sys.stderr, flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
