# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, with the templates of published models (`chat_templates.py`).

Not covered: templates of other families; those that refuse a tool's message without the call before it raise at their
first tool call.
"""

from __future__ import annotations

import numpy as np
import pytest
from chat_templates import TEMPLATES, write_chat_tokenizer

from megatron_rl.agents.transcript import ChatTranscript, TextTranscript, render_tail, rewrites_history
from megatron_rl.rollout.episodes import Recording
from megatron_rl.types import Prompt, Rollout, UserError

QUESTION = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": {}}}]


@pytest.fixture(scope="module", params=TEMPLATES)
def chat(request, tmp_path_factory):
    """The name of a template and its tokenizer."""
    return request.param, write_chat_tokenizer(tmp_path_factory.mktemp("chat"), request.param)


def spell(tokenizer, text, closed=True):
    """A reply letter by letter, as no encoder would write it, and closed by EOS."""
    return [token for letter in text for token in tokenizer.encode(letter)] + [tokenizer.eos_token_id] * closed


def play(tokenizer, replies, answers, **options):
    """The rollout of a conversation, and its requests; replies are tokens, answers messages."""
    prompt = np.array(tokenizer.encode(tokenizer.apply_chat_template(QUESTION)), np.int32)
    recording = Recording(Prompt(0, prompt, "", ""), 0)
    transcript = ChatTranscript(tokenizer, QUESTION, {}, (tokenizer.eos_token_id,), **options)
    requests, tail = [], transcript.begin([])
    for index, reply in enumerate(replies):
        known = [] if tail.is_fork else recording.tokens.tolist()
        requests.append(known + tail.tokens)
        recording.record_request(np.array(requests[-1], np.int32))
        recording.reply(np.array(reply, np.int32), -np.arange(1, len(reply) + 1, dtype=np.float32), 3)
        if index < len(answers):
            tail = transcript.extend(reply, answers[index])
    return recording.finish("stop"), requests


def test_a_conversation_reads_as_the_template_writes_it_and_keeps_the_sampled_tokens(chat):
    _, tokenizer = chat
    replies = [spell(tokenizer, "hello"), spell(tokenizer, "answer")]
    answers = [[{"role": "user", "content": "result 12"}]]
    rollout, requests = play(tokenizer, replies, answers)
    (branch,) = rollout.branches
    history = [*QUESTION, {"role": "assistant", "content": "hello"}, *answers[0]]
    whole = tokenizer.apply_chat_template(history)
    read = tokenizer._tokenizer.decode(branch.tokens.tolist())  # with special tokens
    assert read == whole + "answer" + tokenizer._tokenizer.eos_token
    assert branch.tokens[branch.sampled].tolist() == replies[0] + replies[1]
    assert len(replies[0]) == 6 and tokenizer.encode("hello") != replies[0][:-1]  # the case of another encoding
    assert [turn.start for turn in rollout.turns] == [len(request) for request in requests]
    assert all(branch.tokens[: len(request)].tolist() == request for request in requests)
    assert branch.logprobs[branch.sampled].tolist() == [*range(-1, -7, -1), *range(-1, -8, -1)]
    assert not branch.logprobs[~branch.sampled].any()
    assert set(branch.versions[branch.sampled].tolist()) == {3}


def test_a_reply_cut_by_length_gets_the_closer_as_a_token_that_nobody_sampled(chat):
    _, tokenizer = chat
    replies = [spell(tokenizer, "hello", closed=False), spell(tokenizer, "answer")]
    answers = [[{"role": "user", "content": "result"}]]
    rollout, requests = play(tokenizer, replies, answers)
    (branch,) = rollout.branches
    stop = rollout.turns[0].stop
    assert branch.tokens[stop] == tokenizer.eos_token_id and not branch.sampled[stop]
    closed, _ = play(tokenizer, [spell(tokenizer, "hello"), replies[1]], answers)
    assert closed.branches[0].tokens.tolist() == branch.tokens.tolist()  # the same text in both cases
    assert np.flatnonzero(closed.branches[0].sampled != branch.sampled).tolist() == [stop]


def test_another_stop_token_than_the_closer_closes_the_reply(chat):
    _, tokenizer = chat
    other = tokenizer._tokenizer.convert_tokens_to_ids("<|endoftext|>")
    transcript = ChatTranscript(tokenizer, QUESTION, {}, (tokenizer.eos_token_id, other))
    answer = [{"role": "user", "content": "result"}]
    tail = transcript.extend([*tokenizer.encode("hello"), other], answer)
    assert tokenizer.eos_token_id != tail.tokens[0]
    assert tail == transcript.extend([*tokenizer.encode("hello"), tokenizer.eos_token_id], answer)


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3"])
def test_what_tools_say_is_grouped_as_the_template_groups_it(template, tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, template)
    transcript = ChatTranscript(tokenizer, QUESTION, {"tools": TOOLS}, (tokenizer.eos_token_id,))
    results = [{"role": "tool", "content": "12"}, {"role": "tool", "content": "34"}]
    tail = transcript.extend(spell(tokenizer, "<tool_call>"), results)
    assert tokenizer._tokenizer.decode(tail.tokens) == (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n34\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_which_templates_rewrite_what_was_said(chat):
    name, tokenizer = chat
    assert rewrites_history(tokenizer, {}) == (name == "qwen3")


THOUGHT = "<think>\nhello\n</think>\n\nanswer"


def test_thoughts_are_kept_by_default_whatever_the_template_does(chat):
    _, tokenizer = chat
    replies = [spell(tokenizer, THOUGHT), spell(tokenizer, THOUGHT)]
    rollout, _ = play(tokenizer, replies, [[{"role": "user", "content": "user"}]])
    assert len(rollout.branches) == 1 and rollout.branches[0].sampled.sum() == len(replies[0]) + len(replies[1])


def test_a_template_that_is_followed_forks_where_it_rewrites_and_nowhere_else(chat):
    name, tokenizer = chat
    replies = [spell(tokenizer, THOUGHT) for _ in range(3)]
    answers = [[{"role": "user", "content": "user"}], [{"role": "user", "content": "result"}]]
    rollout, requests = play(tokenizer, replies, answers, follows_template=True)
    assert len(rollout.branches) == (3 if name == "qwen3" else 1)
    assert [turn.branch for turn in rollout.turns] == ([0, 1, 2] if name == "qwen3" else [0, 0, 0])
    sampled = [token for branch in rollout.branches for token in branch.tokens[branch.sampled].tolist()]
    assert sampled == sum(replies, [])  # every token is learned once
    kept, in_order = play(tokenizer, replies, answers)
    if name == "qwen3":
        shown = tokenizer._tokenizer.decode(requests[2])
        history = [*QUESTION, {"role": "assistant", "content": THOUGHT}, *answers[0]]
        history += [{"role": "assistant", "content": THOUGHT}, *answers[1]]
        assert shown == tokenizer.apply_chat_template(history) and "<think>" not in shown
        assert all(branch.num_prompt_tokens == len(rollout.prompt.tokens) for branch in rollout.branches)
    else:
        assert requests == in_order and kept.branches[0].tokens.tolist() == rollout.branches[0].tokens.tolist()


def test_thoughts_stay_while_tools_answer_where_the_template_keeps_them(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "qwen3")
    replies = [spell(tokenizer, THOUGHT), spell(tokenizer, "answer")]
    rollout, _ = play(tokenizer, replies, [[{"role": "tool", "content": "12"}]], follows_template=True)
    assert len(rollout.branches) == 1


def test_messages_before_the_first_reply_follow_those_of_the_task(chat):
    _, tokenizer = chat
    board = [{"role": "user", "content": "result"}]
    transcript = ChatTranscript(tokenizer, QUESTION, {}, (tokenizer.eos_token_id,))
    tail = transcript.begin(board)
    prompt = np.array(tokenizer.encode(tokenizer.apply_chat_template(QUESTION)), np.int32)
    recording = Recording(Prompt(0, prompt, "", ""), 0)
    recording.record_request(np.array(tail.tokens, np.int32))
    recording.reply(np.array([5, 6], np.int32), np.zeros(2, np.float32), 0)
    (branch,) = recording.finish("stop").branches
    assert tokenizer._tokenizer.decode(branch.tokens[:-2].tolist()) == tokenizer.apply_chat_template(QUESTION + board)
    shared = branch.num_prompt_tokens
    assert 0 < shared < len(prompt) and branch.tokens[:shared].tolist() == prompt[:shared].tolist()


def test_a_template_without_contents_is_refused(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    tokenizer._tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(UserError, match="does not render the assistant's messages"):
        render_tail(tokenizer, QUESTION, [], {})


def test_plain_text_goes_on_as_it_is(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    transcript = TextTranscript(tokenizer)
    assert transcript.begin([]).tokens == []
    assert tokenizer.decode(transcript.extend([1], [{"role": "tool", "content": "hello 12"}]).tokens) == "hello 12"


def record(*parts) -> Rollout:
    """A rollout of a prompt and of parts, a list of sampled tokens or a tuple of observed ones."""
    recording = Recording(Prompt(0, np.array([1, 2], np.int32), "", ""), 0)
    for part in parts:
        if isinstance(part, tuple):
            recording.record_request(np.array([*recording.tokens, *part], np.int32))
        else:
            recording.record_request(recording.tokens)
            recording.reply(np.array(part, np.int32), np.zeros(len(part), np.float32), 0)
    return recording.finish("stop")


def test_a_reply_that_is_interrupted_and_continued_is_one_turn_of_two_versions():
    recording = Recording(Prompt(0, np.array([1, 2], np.int32), "", ""), 0)
    recording.record_request(np.array([1, 2], np.int32))
    for tokens, version, is_whole in (([], 3, False), ([5, 6], 3, False), ([], 4, False), ([7], 5, True)):
        recording.reply(np.array(tokens, np.int32), -np.array(tokens, np.float32), version, is_whole=is_whole)
        recording.record_request(recording.tokens)
    recording.judge(0.5)
    rollout = recording.finish("stop")
    (branch,), (turn,) = rollout.branches, rollout.turns
    assert recording.last_reply() == ([5, 6, 7], [-5.0, -6.0, -7.0]) and recording.interrupted == 0
    assert (turn.start, turn.stop) == (2, 5) and branch.tokens.tolist() == [1, 2, 5, 6, 7]
    assert rollout.versions.tolist() == [3, 3, 5] and branch.rewards.tolist() == [0, 0, 0, 0, 0.5]


def test_an_observation_behind_the_last_reply_is_left_out():
    assert record([5, 6], (7,), [8], (9, 9)).branches[0].tokens.tolist() == [1, 2, 5, 6, 7, 8]


def test_an_episode_that_failed_before_its_first_reply_has_a_token_behind_its_prompt_and_none_to_learn():
    (branch,) = record().branches
    assert (branch.tokens.tolist(), branch.num_prompt_tokens, branch.num_loss_tokens) == ([1, 2], 1, 0)
    assert record().answer_tokens.tolist() == [] and record([5], (6,), [7, 8]).answer_tokens.tolist() == [7, 8]


def test_random_conversations_keep_every_sampled_token_in_its_place(chat):
    """100 of them: requests are prefixes of the branches, and each sampled token is there once, with its log-prob."""
    _, tokenizer = chat
    random = np.random.default_rng(1)
    for _ in range(100):
        turns = int(random.integers(1, 6))
        replies = [random.integers(8, tokenizer.vocab_size, random.integers(1, 9)).tolist() for _ in range(turns)]
        replies = [reply + [tokenizer.eos_token_id] * bool(random.integers(2)) for reply in replies]
        answers = [
            [{"role": "user", "content": tokenizer.decode(random.integers(8, 200, 4).tolist())}] for _ in replies[1:]
        ]
        rollout, requests = play(tokenizer, replies, answers, follows_template=bool(random.integers(2)))
        for turn, request, reply in zip(rollout.turns, requests, replies, strict=True):
            tokens = rollout.branches[turn.branch].tokens
            assert tokens[: turn.start].tolist() == request
            assert tokens[turn.start : turn.stop].tolist() == reply
        assert rollout.response_tokens.tolist() == sum(replies, [])
        assert rollout.rollout_logprobs.tolist() == [-float(i + 1) for reply in replies for i in range(len(reply))]


@pytest.mark.parametrize(("version", "expected"), [(3, [10, 10, 10, 20]), (4, [20, 20, 20, 20])])
def test_routes_of_weights_that_read_all_again_replace_those_of_others(version, expected):
    """Tokens of new weights follow from the new routes of their context; under equal weights, the first routes stay."""
    recording = Recording(Prompt(0, np.array([1, 2], np.int32), "", ""), 0)
    recording.record_request(np.array([1, 2], np.int32))
    routes = np.full((4, 1, 1), 255, np.uint8)
    routes[:3] = 10
    recording.reply(np.array([3, 4], np.int32), np.zeros(2, np.float32), 3, routes=routes, is_whole=False)
    routes = np.full((5, 1, 1), 20, np.uint8)
    routes[4] = 255
    recording.reply(np.array([5], np.int32), np.zeros(1, np.float32), version, routes=routes)
    (branch,) = recording.finish("stop").branches
    assert branch.routes is not None and branch.routes.ravel().tolist() == [*expected, 255]


def record_states(*turns: tuple[list[int], str | None]) -> list[dict[int, int]]:
    """States of each branch by token index, of requests of these tokens that the replies [8, 9] answer."""
    recording = Recording(Prompt(0, np.array([1, 2], np.int32), "", ""), 0)
    for tokens, state in turns:
        recording.name_state(state)
        recording.record_request(np.array(tokens, np.int32))
        recording.reply(np.array([8, 9], np.int32), np.zeros(2, np.float32), 3)
    found = [branch.states for branch in recording.finish("stop").branches]
    return [{i: int(one[i]) for i in np.flatnonzero(one)} for one in found]


def test_a_turn_has_the_state_that_it_answers_at_its_first_token():
    """The first one has the whole request, a later one what the request adds; equal contents give equal states."""
    (first,) = record_states(([1, 2], None), ([1, 2, 8, 9, 5], None), ([1, 2, 8, 9, 5, 8, 9, 5], None))
    assert [*first] == [2, 5, 8] and first[5] == first[8] != first[2]
    (other,) = record_states(([1, 2], None), ([1, 2, 8, 9, 6], None))
    assert other[2] == first[2] and other[5] != first[5] and min(*first.values(), *other.values()) > 0


def test_a_named_state_takes_the_place_of_tokens_also_in_a_new_branch():
    (first, forked) = record_states(([1, 2], "start"), ([1, 2, 7, 7], "room"))
    (grown,) = record_states(([1, 2], "start"), ([1, 2, 8, 9, 4, 4], "room"))
    assert [*first] == [2] and [*forked] == [4] and [*grown] == [2, 6]
    assert first[2] == grown[2] and forked[4] == grown[6]
