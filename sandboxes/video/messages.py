"""Messages between the `video` driver and its workers, and the errors that agents can act on."""

from typing import TYPE_CHECKING, Any, Literal

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, Number, plain_json
from sandboxes.ipc.messages import Done

FaultKind = Literal[
    "no-such-video", "not-a-video", "codec", "truncated", "empty", "damaged", "limit", "timeout",
    "not-loaded", "not-preprocessed", "range", "too-large", "memory", "crashed",
]  # fmt: skip
TRANSIENT = frozenset({"memory", "crashed", "timeout"})
"""Errors that a second run may not meet. Only the rollout that made the call gets them."""


class VideoError(Exception):
    """A video tool cannot do what its agent wants. The error becomes the tool's result, as its member `error`."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON members."""
        return {"kind": self.kind, "message": str(self)}


# A worker decodes files that may be hostile, so what it reports is bounded.
if TYPE_CHECKING:
    VideoInfo = dict[str, Any]
    Segment = dict[str, Any]
else:
    VideoInfo = dict[str, plain_json(4)]
    Segment = dict[str, plain_json(0)]


class VideoFault(IpcMessage, op="video_fault"):
    """A `VideoError`, which the agent can act on."""

    kind: FaultKind
    message: str


class LibraryVersions(IpcMessage, op="library_versions"):
    """The versions of the libraries."""

    versions: str


class ReadVersions(IpcRequest[LibraryVersions | VideoFault], op="read_versions"):
    """Return the versions of the libraries, on which the content of parts depends."""


class VideoProbed(IpcMessage, op="video_probed"):
    """The properties of a file."""

    info: VideoInfo


class ProbeVideo(IpcRequest[VideoProbed | VideoFault], op="probe_video"):
    """Read the properties of a file; see `video_file.probe`."""

    path: str
    max_duration_s: float


class BeginPreprocess(IpcRequest[Done | VideoFault], op="begin_preprocess"):
    """Begin to preprocess a video; see `passes.MeasuringPass`."""

    path: str
    folder: str
    info: dict[str, Any]
    settings: dict[str, Any]


class PieceDone(IpcMessage, op="piece_done"):
    """A piece of the preprocess was done, up to a time in a stage; None after the last one."""

    stage: str | None = None
    at_s: Number = 0.0


class PreprocessPiece(IpcRequest[PieceDone | VideoFault], op="preprocess_piece"):
    """Do the next piece of the preprocess that has begun."""


class WriteModel(IpcRequest[Done | VideoFault], op="write_model"):
    """Write the captions and vectors of a model; the body is the rows of the vectors."""

    folder: str
    vectors: dict[str, tuple[int, int]]  # Number and length of the rows, by name.
    captions: list[str]  # One for each segment, as are the lists of objects.
    objects: list[list[str]]


class Reading(IpcRecord):
    """Which video is read, and within which limits."""

    path: str
    measured: str | None  # The folder of its measurements; None before `preprocess`.
    described: str | None  # The folder of a model's captions; None without a model.
    model: str  # The name of the model, or `none`.
    limit_bytes: int  # Largest output.


class VideoToolDone(IpcMessage, op="video_tool_done"):
    """The body is a tool's output. frame_t: the time of the picture that it is; None for other bodies."""

    media_type: str
    frame_t: Number | None


class RunVideoTool(IpcRequest[VideoToolDone | VideoFault], op="run_video_tool"):
    """Run one of the tools that only read; the body is the vectors of the description that is looked for."""

    video: Reading
    name: str
    arguments: dict[str, Any]


class SegmentsShown(IpcMessage, op="segments_shown"):
    """Segments; the body is their pictures."""

    segments: list[Segment]
    sizes: list[int]  # The size of each picture in bytes.
    of: int  # How many segments the video has.


class ShowSegments(IpcRequest[SegmentsShown | VideoFault], op="show_segments"):
    """Return segments and the picture that represents each."""

    video: Reading
    first: int
    count: int


class ShowSegment(IpcRequest[SegmentsShown | VideoFault], op="show_segment"):
    """Return one segment, and the pictures that a model is shown with a question about it."""

    video: Reading
    segment: int


class ObjectsSeen(IpcMessage, op="objects_seen"):
    """The numbers of the segments in which a model saw each object, and how many segments there are."""

    objects: dict[str, list[int]]
    segments: int


class ReadObjects(IpcRequest[ObjectsSeen | VideoFault], op="read_objects"):
    """Return the objects that a model saw."""

    video: Reading
