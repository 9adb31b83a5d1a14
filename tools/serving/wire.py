# SPDX-License-Identifier: Apache-2.0
"""Messages of the Tinker API in protobuf: requests of forward_backward, and the results of it and of sampling.

The schema is the client's (0.38.0); `tests/tools/serving/test_wire.py` compares it with the
client's own where that is installed. The protobuf runtime comes with vLLM. Enumerations are written as int32, and
fields of a `oneof` as plain fields, which have the same bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from megatron_rl.training.datums import Datum
from megatron_rl.types import UserError

# message: number type name, ...; `*` is repeated, `%` a map from strings.
_SCHEMA = """
SampleResponse: 1 *SampledSequence sequences, 2 bytes prompt_logprobs, 3 TopkLogprobs topk_prompt_logprobs,
    5 Tensor target_prompt_logprobs
SampledSequence: 1 int32 stop_reason, 2 bytes tokens, 3 bytes logprobs, 4 TopkLogprobs topk_sampled_logprobs
TopkLogprobs: 1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length
SparseCsr: 1 bytes values, 2 bytes crow_indices, 3 bytes col_indices
Tensor: 1 bytes dense, 2 SparseCsr sparse_csr, 3 int32 dtype, 4 *int64 shape
BatchedTensor: 1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 *int64 trailing_shape
ArrayRecord: 1 string type_tag, 2 %BatchedTensor fields, 3 int64 num_datums
ForwardBackwardOutput: 1 string loss_fn_output_type, 2 *ArrayRecord loss_fn_outputs, 3 %double metrics
ForwardBackwardRequest: 1 string model_id, 2 int32 seq_id, 3 *Datum data, 4 string loss_fn, 5 %double loss_fn_config,
    6 bool forward_only, 7 %LossConfigValue loss_fn_config_v2
LossConfigValue: 1 double number, 2 string text
Datum: 1 *Chunk model_input, 2 %Tensor loss_fn_inputs
Chunk: 1 EncodedTextChunk encoded_text
EncodedTextChunk: 1 bytes tokens
"""
_FLOAT32, _INT64 = 1, 2
_TYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), 3: np.dtype("<i4")}
STOP, LENGTH = 0, 1
NO_LOGPROB = -99999.0  # an empty cell of a table of the most likely tokens
Field = descriptor_pb2.FieldDescriptorProto


def _build_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="served.proto", package="served", syntax="proto3")
    for name, body in re.findall(r"^(\w+): (.*(?:\n    .*)*)", _SCHEMA, re.MULTILINE):
        message = file.message_type.add(name=name)
        for number, mark, kind, key in re.findall(r"(\d+) ([*%]?)(\w+) (\w+)", body):
            if mark == "%":
                entry = message.nested_type.add(name="".join(map(str.capitalize, key.split("_"))) + "Entry")
                entry.options.map_entry = True
                _add_field(entry, 1, "string", "key")
                _add_field(entry, 2, kind, "value")
                kind = f"{name}.{entry.name}"
            _add_field(message, int(number), kind, key, is_repeated=bool(mark))
    pool = descriptor_pool.DescriptorPool()  # of its own, beside a client's schema in the same process
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"served.{message.name}") for message in file.message_type]
    return {one.name: message_factory.GetMessageClass(one) for one in found}


def _add_field(message: Any, number: int, kind: str, name: str, is_repeated: bool = False) -> None:
    label = Field.LABEL_REPEATED if is_repeated else Field.LABEL_OPTIONAL
    added = message.field.add(name=name, number=number, label=label)
    if kind[0].isupper():
        added.type, added.type_name = Field.TYPE_MESSAGE, f".served.{kind}"
    else:
        added.type = getattr(Field, f"TYPE_{kind.upper()}")


MESSAGES = _build_messages()
_MOST_TARGETS = 128  # per position


def parse_forward_backward(body: bytes) -> Any:
    """Return the request message of a body, whose data `read_data` checks.

    Raises:
        UserError: it is not a request with a model and a sequence number.
    """
    try:
        message = MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise refuse(f"a body that is no protobuf message: {error}", "forward_backward") from None
    if not message.model_id or message.seq_id < 1:
        raise refuse("a request without model_id and seq_id", "forward_backward")
    return message


def read_data(message: Any) -> list[Datum]:
    """Return the data of a forward_backward request.

    Raises:
        UserError: no data, a chunk that is no text, or a tensor whose bytes do not fit its shape.
    """
    if not message.data:
        raise refuse("a request without data", "forward_backward")
    data = []
    for index, datum in enumerate(message.data):
        where = f"datum {index}"
        chunks = [chunk.encoded_text.tokens for chunk in datum.model_input]
        if not all(chunk.HasField("encoded_text") for chunk in datum.model_input) or not any(chunks):
            raise refuse(f"{where}: a model input without tokens, or with an image or audio", "model_input", "text")
        tokens = _read(b"".join(chunks), _TYPES[3], where)
        inputs = {name: read_tensor(tensor, f"{where}, {name}") for name, tensor in datum.loss_fn_inputs.items()}
        if "target_tokens" not in inputs:
            raise refuse(
                f"{where} has no target_tokens", "loss_fn_inputs", "target_tokens, and the columns of the loss"
            )
        data.append(Datum(tokens, inputs.pop("target_tokens"), inputs))
    return data


def read_config(message: Any) -> dict[str, float | str]:
    """Return the settings of a request's loss."""
    if message.loss_fn_config_v2:
        return {name: value.text or value.number for name, value in message.loss_fn_config_v2.items()}
    return dict(message.loss_fn_config)


def _read(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise refuse(f"{where}: {len(data)} bytes of {dtype}", where, f"a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def read_json_tensor(given: Any, where: str) -> Any:
    """Return the message of an int64 tensor in JSON (UserError if it is none)."""
    names = "data", "shape", "sparse_crow_indices", "sparse_col_indices"
    try:
        values, shape, rows, columns = (np.array(given.get(name) or [], object).astype("<i8") for name in names)
        message = MESSAGES["Tensor"](dtype=_INT64, shape=shape.tolist())
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise refuse(f"{where}: {error}", where, "a tensor of token ids") from None
    if given.get("sparse_crow_indices") is None:
        message.dense = values.tobytes()
    else:
        parts = dict(values=values, crow_indices=rows, col_indices=columns)
        for name, part in parts.items():
            setattr(message.sparse_csr, name, part.tobytes())
    return message


def write_like(tensor: Any, values: np.ndarray) -> Any:
    """Return the message of float32 values in the layout of a tensor: dense, or with its sparse cells."""
    message = MESSAGES["Tensor"](dtype=_FLOAT32, shape=tensor.shape)
    if tensor.HasField("sparse_csr"):
        sparse = tensor.sparse_csr
        rows, columns = (np.frombuffer(part, "<i8") for part in (sparse.crow_indices, sparse.col_indices))
        values = values[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns]
        message.sparse_csr.crow_indices, message.sparse_csr.col_indices = sparse.crow_indices, sparse.col_indices
        message.sparse_csr.values = values.astype("<f4").tobytes()
    else:
        message.dense = values.astype("<f4").tobytes()
    return message


def read_tensor(tensor: Any, where: str, empty: int = 0) -> np.ndarray:
    """Return a tensor, dense; cells that a sparse one does not have are `empty`."""
    dtype, shape = _TYPES.get(tensor.dtype), [*tensor.shape]
    if dtype is None or tensor.dtype not in (_FLOAT32, _INT64):
        raise refuse(f"{where}: dtype {tensor.dtype}", where, "float32 or int64")
    if len(shape) > 2 or (len(shape) == 2 and not 1 <= shape[1] <= _MOST_TARGETS):
        raise refuse(f"{where}: shape {shape}", where, f"[N], or [N, K] with at most {_MOST_TARGETS} columns")
    if not tensor.HasField("sparse_csr"):
        values = _read(tensor.dense, dtype, where)
        if shape and math.prod(shape) != len(values):
            raise refuse(f"{where}: {len(values)} values of shape {shape}", where)
        return values.reshape(shape or len(values))
    sparse = tensor.sparse_csr
    values, rows, columns = (
        _read(data, kind, where)
        for data, kind in ((sparse.values, dtype), (sparse.crow_indices, _TYPES[2]), (sparse.col_indices, _TYPES[2]))
    )
    counts = np.diff(rows)
    is_whole = len(shape) == 2 and len(counts) == shape[0] and (counts >= 0).all() and rows[0] == 0
    if not is_whole or not rows[-1] == len(values) == len(columns) or ((columns < 0) | (columns >= shape[1])).any():
        raise refuse(f"{where}: broken sparse indices", where, "crow_indices and col_indices of a CSR matrix")
    dense = np.full(shape, empty, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_outputs(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the result of forward_backward.

    Args:
        logprobs: per datum, [s] or [s, k].
        metrics: `name:reduction` -> value; the client needs `loss:sum`.
    """
    out = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing_shape, group in itertools.groupby(logprobs, lambda values: values.shape[1:]):
        rows = [np.ascontiguousarray(values, "<f4").data for values in group]
        record = out.loss_fn_outputs.add(num_datums=len(rows))
        batched = record.fields["logprobs"]
        batched.data, batched.dtype = b"".join(rows), _FLOAT32
        batched.offsets = np.cumsum([0, *(values.nbytes for values in rows)], dtype="<i8").tobytes()
        batched.trailing_shape.extend(trailing_shape)
    return out.SerializeToString()


def refuse(found: str, source: str, expected: str = "a request of the Tinker API", hint: str = "") -> UserError:
    """Return the error of a request that can never succeed."""
    return UserError(found, source=source, expected=expected, hint=hint or "correct the request; nothing was changed")
