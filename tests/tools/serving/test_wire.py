# SPDX-License-Identifier: Apache-2.0
"""Bytes of the Tinker API: our schema against the client's where it is installed, values there and back, broken bodies.

Not covered: images and audio, which are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.engines.protocol import Sampled
from megatron_rl.engines.token_requests import Scores, TokenRequest
from megatron_rl.types import UserError
from tools.serving.request_checks import Limits, SampleJob, read_sample, write_samples
from tools.serving.wire import MESSAGES, parse_forward_backward, read_config, read_data, read_tensor, write_outputs


def make_request(tokens: Any = (3, 4, 5), **columns: Any) -> Any:
    request = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="ppo")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values in columns.items():
        tensor, array = datum.loss_fn_inputs[name], np.asarray(values)
        tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype.kind == "i" else 1
        tensor.shape.extend(array.shape)
    return request


def test_the_schema_is_the_clients() -> None:
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2", reason="the package tinker is not installed")
    for name, message in MESSAGES.items():
        for field in message.DESCRIPTOR.fields:
            other = getattr(theirs, name).DESCRIPTOR.fields_by_name[field.name]
            assert (other.number, other.is_repeated) == (field.number, field.is_repeated)
            assert other.type == field.type or (other.type, field.type) == (other.TYPE_ENUM, other.TYPE_INT32)


def test_known_bytes_of_a_request() -> None:
    """A request by the rules of the wire format, written by hand: field number << 3 | type, length, content."""
    tokens = b"\x03\x00\x00\x00"
    chunk = b"\x0a\x06\x0a\x04" + tokens
    datum = b"\x0a" + bytes([len(chunk)]) + chunk
    body = b"\x0a\x01m" + b"\x10\x07" + b"\x1a" + bytes([len(datum)]) + datum + b"\x22\x03ppo" + b"\x30\x01"
    request = parse_forward_backward(body)
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == ("m", 7, "ppo", True)
    assert request.data[0].model_input[0].encoded_text.tokens == tokens


def test_data_come_as_they_were_sent() -> None:
    request = make_request(target_tokens=[4, 5, 6], advantages=np.array([0.5, -1.0, 0.0], np.float32))
    request.loss_fn_config_v2["clip_low_threshold"].number = 0.9
    sparse = request.data[0].loss_fn_inputs["weights"]
    sparse.dtype = 1
    sparse.shape.extend((3, 2))
    sparse.sparse_csr.values = np.array([0.5, 2.0], np.float32).tobytes()
    sparse.sparse_csr.crow_indices = np.array([0, 1, 1, 2], np.int64).tobytes()
    sparse.sparse_csr.col_indices = np.array([1, 0], np.int64).tobytes()
    parsed = parse_forward_backward(request.SerializeToString())
    (datum,) = read_data(parsed)
    assert np.array_equal(datum.tokens, [3, 4, 5]) and np.array_equal(datum.targets, [4, 5, 6])
    assert np.array_equal(datum.columns["advantages"], np.array([0.5, -1.0, 0.0], np.float32))
    assert np.array_equal(datum.columns["weights"], [[0, 0.5], [0, 0], [2, 0]])
    assert read_config(parsed) == {"clip_low_threshold": 0.9}


def test_answers_can_be_read_back() -> None:
    """Neighbors of one width share a record, which the client reads faster than many."""
    flat, table = np.array([-1.5, -2.0], np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = [flat, flat[:1], table, flat[::-1]]
    found = MESSAGES["ForwardBackwardOutput"].FromString(write_outputs(rows, {"loss:sum": 2.5}))
    assert dict(found.metrics) == {"loss:sum": 2.5} and [one.num_datums for one in found.loss_fn_outputs] == [2, 1, 1]
    read = []
    for record in found.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        assert len(offsets) == record.num_datums + 1 and offsets[0] == 0 and offsets[-1] == len(field.data)
        parts = np.split(np.frombuffer(field.data, "<f4"), offsets[1:-1] // 4)
        read += [part.reshape(-1, *field.trailing_shape) for part in parts]
    assert all(np.array_equal(one, other) for one, other in zip(read, rows, strict=True))


def test_samples_can_be_read_back() -> None:
    """Only the last of three prompt tokens is scored; an empty cell of a table has id 0 and -99999."""
    cut = np.array([[-0.1, -np.inf]], np.float32)
    top = np.array([[np.nan, np.nan], [-1.0, -2.0], [-0.5, -3.0]], np.float32)
    ids = np.array([[0, 0], [5, 6], [7, 8]], np.int32)
    scores = Scores(np.array([[4, 9]], np.int32), cut, np.array([np.nan, -1.0, -2.0], np.float32), ids, top)
    sampled = Sampled(0, np.array([4], np.int32), np.array([-0.1], np.float32), "length", scores=scores)
    job = SampleJob(TokenRequest([1, 2, 3], 1, top_logprobs=2, prompt_logprobs=2), 1, num_scored=1)
    found = MESSAGES["SampleResponse"].FromString(write_samples(job, [sampled]))
    (sequence,) = found.sequences
    assert sequence.stop_reason == 1 and np.frombuffer(sequence.tokens, "<i4").tolist() == [4]
    assert np.array_equal(np.frombuffer(found.prompt_logprobs, "<f4"), [np.nan, np.nan, -2.0], equal_nan=True)
    for table, expected_ids, expected in (
        (sequence.topk_sampled_logprobs, [4, 0], [-0.1, -99999]),
        (found.topk_prompt_logprobs, [0, 0, 5, 6, 7, 8], [-99999, -99999, -1, -2, -0.5, -3]),
    ):
        assert np.frombuffer(table.token_ids, "<i4").tolist() == expected_ids
        assert np.array_equal(np.frombuffer(table.logprobs, "<f4"), np.array(expected, np.float32))
        assert (table.length, table.k) == (len(expected) // 2, 2)


def break_tensor(request: Any, **changes: Any) -> None:
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    for name, value in changes.items():
        if name == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.data.pop(), "a request without data"),
        (lambda r: r.data[0].model_input.pop(), "without tokens"),
        (lambda r: r.data[0].model_input.add(), "image or audio"),
        (lambda r: r.data[0].loss_fn_inputs.pop("target_tokens"), "no target_tokens"),
        (lambda r: break_tensor(r, dense=b"123"), "3 bytes of int64"),
        (lambda r: break_tensor(r, dtype=4), "dtype 4"),
        (lambda r: break_tensor(r, shape=[2]), r"3 values of shape \[2\]"),
        (lambda r: break_tensor(r, shape=[-3]), r"3 values of shape \[-3\]"),
        (lambda r: break_tensor(r, shape=[3, 1 << 40]), "shape"),
        (lambda r: break_tensor(r, shape=[1 << 40, 2]), "shape"),
    ],
)
def test_broken_data_are_refused(change: Any, message: str) -> None:
    request = make_request(target_tokens=[4, 5, 6])
    change(request)
    with pytest.raises(UserError, match=message):
        read_data(request)


@pytest.mark.parametrize(("rows", "columns"), [([0, 1, 1], [0]), ([0, 1, 1, 2], [0]), ([0, 2, 1, 1], [0]), ([], [])])
def test_broken_sparse_indices_are_refused(rows: list[int], columns: list[int]) -> None:
    request = make_request(target_tokens=[4, 5, 6])
    break_tensor(request, shape=[3, 2])
    sparse = request.data[0].loss_fn_inputs["target_tokens"].sparse_csr
    sparse.values = np.array([1], np.int64).tobytes()
    sparse.crow_indices, sparse.col_indices = (np.array(x, np.int64).tobytes() for x in (rows, columns))
    with pytest.raises(UserError, match="broken sparse indices"):
        read_data(request)


def test_a_sparse_matrix_of_any_height_needs_no_memory() -> None:
    request = make_request(target_tokens=[4, 5, 6])
    break_tensor(request, shape=[1 << 40, 2])
    request.data[0].loss_fn_inputs["target_tokens"].sparse_csr.crow_indices = np.zeros(3, np.int64).tobytes()
    with pytest.raises(UserError, match="broken sparse indices"):
        read_data(request)


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"{}", b"\x0a\x01m", b"\x10\x01"])
def test_a_body_without_model_and_number_is_refused(body: bytes) -> None:
    with pytest.raises(UserError, match="forward_backward"):
        parse_forward_backward(body)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_log_probs_of_given_tokens_have_their_layout(is_sparse: bool) -> None:
    given = {"data": [5, -1, 6, 7], "dtype": "int64", "shape": [2, 2]}
    if is_sparse:
        given |= {"data": [5, 6, 7], "sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [0, 0, 1]}
    body = {"prompt": {"chunks": [{"tokens": [3, 4, 5]}]}, "target_prompt_logprobs": given}
    job = read_sample(body, Limits(vocab_size=8, context=16))
    _, targets = job.read_targets()
    assert np.array_equal(targets, [[5, -1], [6, 7]])
    sampled = Sampled(0, np.array([4], np.int32), np.array([-0.1], np.float32), "length")
    scored = np.array([[-1.0, -9.0], [-2.0, -3.0]], np.float32)
    found = MESSAGES["SampleResponse"].FromString(write_samples(job, [sampled], scored)).target_prompt_logprobs
    assert list(found.shape) == [2, 2] and found.HasField("sparse_csr") == is_sparse
    assert np.array_equal(read_tensor(found, "found"), [[-1, 0], [-2, -3]])


@pytest.mark.parametrize(
    "given",
    [
        [1],
        {"data": [5, 5]},
        {"data": [5, 5], "shape": [1, 2]},
        {"data": [-1, -1], "shape": [2, 1]},
        {"data": [5, 8], "shape": [2, 1]},
        {"data": [5, -2], "shape": [2, 1]},
        {"data": [5, "x"], "shape": [2, 1]},
        {"data": [5, 1 << 70], "shape": [2, 1]},
        {"data": [5], "shape": [2, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(given: Any) -> None:
    body = {"prompt": {"chunks": [{"tokens": [3, 4, 5]}]}, "target_prompt_logprobs": given}
    with pytest.raises(UserError, match="target_prompt_logprobs"):
        read_sample(body, Limits(vocab_size=8, context=16))
