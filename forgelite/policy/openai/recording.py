"""Sessions, recorded token by token, and the trajectories that they become.

    request ──> prompt ids: the recorded tokens of the turn that it extends, verbatim, and the tokens of what is new
                            (or, where it extends none: the whole prompt, a branch of its own)
    answer  ──> a turn: prompt ids, sampled tokens with logprobs and version spans
    session ──> a tree of turns; each path from a root to a leaf is one trajectory

Text is never tokenized twice: what the policy sampled is what its next prompt holds and what is trained.
Where all paths are trained, a sampled token that several of them share is trained in the first one only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forgelite.errors import ForgeliteError, StationDied
from forgelite.policy.openai.api_errors import ApiError
from forgelite.policy.openai.chat import Conversation, continuation, render
from forgelite.policy.openai.text import ChatTokenizer
from forgelite.types import Completion, SamplingParams, Trajectory


@dataclass(kw_only=True, slots=True, eq=False)
class Turn:
    """One answer of the policy, and what it was an answer to.

    Example: the second turn of a session has the first as its `parent`, and `prompt_ids` that begin with the first's
    prompt and sampled tokens.
    """

    completion: Completion
    text: str  # of the completion, special tokens left out
    conversation: Conversation | None  # with the answer as its last message; None: of the completions route
    parent: Turn | None  # the turn that its prompt goes on from


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedPrompt:
    """The tokens that a request is answered to. Example: `PlannedPrompt(prompt_ids=(7, 2, 41), parent=None)`."""

    prompt_ids: tuple[int, ...]  # [P]
    parent: Turn | None


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """The turns of one rollout.

    Example: `recorder.open("g12/3", sampling=SamplingParams(max_tokens=64, seed=5), max_length=1024)`.
    """

    session_id: str
    opened: bool  # by `open`; others are dropped when there are too many
    sampling: SamplingParams | None = None  # holds for every request of a rollout; None: what the request says
    max_length: int | None = None  # tokens of a prompt and its answer together; None: the model's own limit
    turns: list[Turn] = field(default_factory=list)  # in the order in which they were answered
    requests: int = 0
    died: StationDied | None = None  # the policy's death, if a request met it
    aborted: bool = False  # a request of it was ended from outside: the rollout is not wanted any more

    def next_request_id(self) -> str:
        """`<session>/<k>` for its k-th request."""
        self.requests += 1
        return f"{self.session_id}/{self.requests - 1}"

    def request_sampling(self, request_id: str) -> SamplingParams | None:
        """The session's sampling, with a seed of its own for every request."""
        sampling = self.sampling
        if sampling is None or sampling.seed is None:
            return sampling
        digest = hashlib.blake2b(f"{sampling.seed}/{request_id}".encode(), digest_size=4).digest()
        return replace(sampling, seed=int.from_bytes(digest, "little") >> 1)


class SessionRecorder:
    """Keeps the sessions of an endpoint. Belongs to the event loop of the endpoint."""

    def __init__(self, *, max_unopened: int = 0) -> None:
        """Args:
        max_unopened: sessions that begin with a request and not with `open`; beyond that the one that was used
            longest ago is dropped. 0: a request of a session that was not opened is refused.
        """
        self._sessions: dict[str, Session] = {}
        self._max_unopened = max_unopened

    def open(
        self, session_id: str, *, sampling: SamplingParams | None = None, max_length: int | None = None
    ) -> Session:
        """Begin a session, which is kept until `close`.

        Args:
            session_id: not open already.
            sampling: see `Session.sampling`.
            max_length: see `Session.max_length`.

        Raises:
            ForgeliteError: it is open already.
        """
        if session_id in self._sessions:
            raise ForgeliteError(f"session {session_id} is open already: every rollout needs an id of its own")
        session = Session(session_id=session_id, opened=True, sampling=sampling, max_length=max_length)
        self._sessions[session_id] = session
        return session

    def close(self, session_id: str) -> None:
        """Forget a session. Safe to call again."""
        self._sessions.pop(session_id, None)

    def find(self, session_id: str) -> Session:
        """The session of that id. Raises ApiError (404) when there is none."""
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"there is no session {session_id!r}: it ended, or never began", code="no_session")
        return session

    def for_request(self, session_id: str) -> Session:
        """The session that a request belongs to, which may begin with it. Raises ApiError (404)."""
        session = self._sessions.get(session_id)
        if session is None and self._max_unopened > 0:
            session = Session(session_id=session_id, opened=False)
        if session is None:
            return self.find(session_id)
        if not session.opened:
            self._sessions.pop(session_id, None)
            self._sessions[session_id] = session  # the last used is the last dropped
            unopened = [s.session_id for s in self._sessions.values() if not s.opened]
            for oldest in unopened[: len(unopened) - self._max_unopened]:
                del self._sessions[oldest]
        return session

    def branches(self, session_id: str, *, group_id: str) -> list[Trajectory]:
        """What a session has recorded so far, for whoever trains one branch of it: each has all that was sampled on
        its way in its loss mask. Otherwise as `trajectories`."""
        return [_trajectory(name, group_id, leaf, set()) for name, leaf in _leaves(self.find(session_id))]

    def trajectories(self, session_id: str, *, group_id: str) -> list[Trajectory]:
        """What a session has recorded so far, for whoever trains all of it: every sampled token once.

        Args:
            session_id: of an existing session.
            group_id: that the trajectories get.

        Returns:
            One for each branch, in the order in which the branches ended; the first has the id `session_id`, the
            k-th `session_id/branch<k>`.

        Raises:
            ApiError: 404, there is no such session.
        """
        trained: set[int] = set()
        return [_trajectory(name, group_id, leaf, trained) for name, leaf in _leaves(self.find(session_id))]


def plan_completion(session: Session | None, prompt_ids: Sequence[int]) -> PlannedPrompt:
    """The prompt of the completions route: it goes on from the turn whose tokens it begins with, if there is one."""
    prompt = tuple(prompt_ids)
    best: Turn | None = None
    size = 0
    for turn in session.turns if session is not None else ():
        recorded = (*turn.completion.prompt_ids, *turn.completion.token_ids)
        if size < len(recorded) < len(prompt) and prompt[: len(recorded)] == recorded:
            best, size = turn, len(recorded)
    return PlannedPrompt(prompt_ids=prompt, parent=best)


def plan_chat(session: Session | None, conversation: Conversation, tokenizer: ChatTokenizer) -> PlannedPrompt:
    """The prompt of the chat route: it goes on from the longest recorded conversation that it extends.

    Raises:
        ApiError: see `chat.render`.
    """
    extended = [
        turn
        for turn in (session.turns if session is not None else ())
        if turn.conversation is not None and conversation.extends(turn.conversation)
    ]
    for turn in sorted(extended, key=lambda t: len(t.conversation.messages), reverse=True):
        sampled = turn.completion.token_ids
        last = sampled[-1] if sampled else None
        text = continuation(tokenizer, turn.conversation, conversation, last_token=last)
        if text is not None:
            new = tokenizer.encode(text, add_special_tokens=False)
            return PlannedPrompt(prompt_ids=(*turn.completion.prompt_ids, *sampled, *new), parent=turn)
    text = render(tokenizer, conversation, add_generation_prompt=True)
    return PlannedPrompt(prompt_ids=tuple(tokenizer.encode(text, add_special_tokens=False)), parent=None)


def _leaves(session: Session) -> list[tuple[str, Turn]]:
    """The last turn of each branch, with the branch's name."""
    continued = {id(turn.parent) for turn in session.turns}
    leaves = [turn for turn in session.turns if id(turn) not in continued]
    return [(f"{session.session_id}/branch{k}" if k else session.session_id, leaf) for k, leaf in enumerate(leaves)]


def _trajectory(trajectory_id: str, group_id: str, leaf: Turn, trained: set[int]) -> Trajectory:
    """The path to `leaf`. Turns in `trained` are left out of its loss; its own are added to them."""
    path = [leaf]
    while path[0].parent is not None:
        path.insert(0, path[0].parent)
    token_ids = [*leaf.completion.prompt_ids, *leaf.completion.token_ids]
    trajectory = Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        token_ids=token_ids,
        loss_mask=[False] * len(token_ids),
        logprobs=[0.0] * len(token_ids),
        spans=[],
        finish_reason=leaf.completion.finish_reason,
        completion_text="".join(turn.text for turn in path),
    )
    for turn in path:
        start, sampled = len(turn.completion.prompt_ids), turn.completion
        end = start + len(sampled.token_ids)
        trajectory.loss_mask[start:end] = [id(turn) not in trained] * len(sampled.token_ids)
        trajectory.logprobs[start:end] = sampled.logprobs
        trajectory.spans += [span.shifted(start) for span in sampled.spans]
        trained.add(id(turn))
    return trajectory
