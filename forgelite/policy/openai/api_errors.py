"""Errors as OpenAI's clients know them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from forgelite.errors import DeadlineExceeded, ForgeliteError, RequestRejected, StationDied

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
}


class ApiError(ForgeliteError):
    """What a client is answered instead of a completion. Example: `ApiError(400, "n must be 1", param="n")`."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        """Args:
        status: HTTP status.
        message: what is wrong and what to do about it.
        code: OpenAI's word for it, such as `context_length_exceeded`.
        param: the field of the request that is wrong.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: ForgeliteError) -> ApiError:
    """What a client is told of an error of the policy."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected):
        return ApiError(400, str(error))
    if isinstance(error, StationDied):
        return ApiError(503, str(error), code="policy_unavailable")
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="deadline_exceeded")
    return ApiError(500, str(error), code="generation_failed")
