"""A recorded answer as a page can show it, whatever its bytes are (pure)."""

from proxy.control.views.common import SHOWN_CHARS, AnswerView, answer_view
from sandboxes.calls import ToolResult

_NOT_TEXT = ("image/", "video/", "audio/", "application/octet-stream")


class ShownAnswer(AnswerView):
    """An answer. exact: no byte of it was replaced by U+FFFD in `text`."""

    exact: bool = True


def shown(result: ToolResult) -> ShownAnswer:
    """Return what of an answer is shown: milliseconds for one of some megabytes, so ask in a thread."""
    view = ShownAnswer(**dict(answer_view(result)))
    if view.text is not None or view.json_ is not None or result.media_type.startswith(_NOT_TEXT):
        return view
    text = result.body[:SHOWN_CHARS].decode(errors="replace")
    return view.model_copy(update={"text": text, "exact": False, "truncated": len(result.body) > SHOWN_CHARS})
