from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ERROR_CODE_UNSPECIFIED: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_UNKNOWN_SESSION: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_POSITION_MISMATCH: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_INVALID_ARGUMENT: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_ALREADY_OPEN: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_TOO_MANY_SESSIONS: _ClassVar[SessionErrorCode]
    SESSION_ERROR_CODE_INTERNAL: _ClassVar[SessionErrorCode]
SESSION_ERROR_CODE_UNSPECIFIED: SessionErrorCode
SESSION_ERROR_CODE_UNKNOWN_SESSION: SessionErrorCode
SESSION_ERROR_CODE_POSITION_MISMATCH: SessionErrorCode
SESSION_ERROR_CODE_INVALID_ARGUMENT: SessionErrorCode
SESSION_ERROR_CODE_ALREADY_OPEN: SessionErrorCode
SESSION_ERROR_CODE_TOO_MANY_SESSIONS: SessionErrorCode
SESSION_ERROR_CODE_INTERNAL: SessionErrorCode

class DecodeRequest(_message.Message):
    __slots__ = ("step", "steps", "commit_batch", "draft_batch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BATCH_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: _containers.RepeatedCompositeFieldContainer[SessionStep]
    commit_batch: CommitBatch
    draft_batch: DraftBatch
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ..., commit_batch: _Optional[_Union[CommitBatch, _Mapping]] = ..., draft_batch: _Optional[_Union[DraftBatch, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("step", "trees", "errors", "tree_batch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TREE_BATCH_FIELD_NUMBER: _ClassVar[int]
    step: int
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    errors: _containers.RepeatedCompositeFieldContainer[SessionError]
    tree_batch: TreeBatch
    def __init__(self, step: _Optional[int] = ..., trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SessionError, _Mapping]]] = ..., tree_batch: _Optional[_Union[TreeBatch, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("trees", "errors")
    TREES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    errors: _containers.RepeatedCompositeFieldContainer[SessionError]
    def __init__(self, trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SessionError, _Mapping]]] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("session_id", "open", "commit", "truncate", "draft", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    open: OpenStep
    commit: CommitStep
    truncate: TruncateStep
    draft: DraftStep
    close: CloseStep
    def __init__(self, session_id: _Optional[int] = ..., open: _Optional[_Union[OpenStep, _Mapping]] = ..., commit: _Optional[_Union[CommitStep, _Mapping]] = ..., truncate: _Optional[_Union[TruncateStep, _Mapping]] = ..., draft: _Optional[_Union[DraftStep, _Mapping]] = ..., close: _Optional[_Union[CloseStep, _Mapping]] = ...) -> None: ...

class OpenStep(_message.Message):
    __slots__ = ("prompt", "namespace")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    prompt: bytes
    namespace: str
    def __init__(self, prompt: _Optional[bytes] = ..., namespace: _Optional[str] = ...) -> None: ...

class CommitStep(_message.Message):
    __slots__ = ("start", "tokens", "candidates", "hidden")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: bytes
    candidates: Candidates
    hidden: bytes
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[bytes] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ..., hidden: _Optional[bytes] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("tokens", "previous", "ids", "probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    previous: bytes
    ids: bytes
    probs: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., previous: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., probs: _Optional[bytes] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("session_ids", "starts", "lengths", "rows", "widths", "tokens", "candidates")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    widths: _containers.RepeatedScalarFieldContainer[int]
    tokens: bytes
    candidates: Candidates
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., widths: _Optional[_Iterable[int]] = ..., tokens: _Optional[bytes] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ...) -> None: ...

class DraftBatch(_message.Message):
    __slots__ = ("session_ids", "max_nodes", "min_prob")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROB_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    max_nodes: int
    min_prob: float
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., max_nodes: _Optional[int] = ..., min_prob: _Optional[float] = ...) -> None: ...

class TruncateStep(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class DraftStep(_message.Message):
    __slots__ = ("max_nodes", "min_prob", "proposal")
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROB_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    max_nodes: int
    min_prob: float
    proposal: Proposal
    def __init__(self, max_nodes: _Optional[int] = ..., min_prob: _Optional[float] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("tokens", "parents", "probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    probs: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., probs: _Optional[bytes] = ...) -> None: ...

class CloseStep(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("session_id", "tokens", "parents", "probs", "sources")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    tokens: bytes
    parents: bytes
    probs: bytes
    sources: bytes
    def __init__(self, session_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., probs: _Optional[bytes] = ..., sources: _Optional[bytes] = ...) -> None: ...

class TreeBatch(_message.Message):
    __slots__ = ("session_ids", "sizes", "tokens", "parents", "probs", "sources")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    tokens: bytes
    parents: bytes
    probs: bytes
    sources: bytes
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., probs: _Optional[bytes] = ..., sources: _Optional[bytes] = ...) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("session_id", "code", "message")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    code: SessionErrorCode
    message: str
    def __init__(self, session_id: _Optional[int] = ..., code: _Optional[_Union[SessionErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "vocab_size", "max_nodes", "tokenizer_fingerprint", "index_paths", "max_message_bytes", "max_sessions", "open_sessions", "idle_seconds", "hidden_size", "state_map", "plain_socket", "batches")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INDEX_PATHS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATE_MAP_FIELD_NUMBER: _ClassVar[int]
    PLAIN_SOCKET_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    version: str
    vocab_size: int
    max_nodes: int
    tokenizer_fingerprint: str
    index_paths: _containers.RepeatedScalarFieldContainer[str]
    max_message_bytes: int
    max_sessions: int
    open_sessions: int
    idle_seconds: float
    hidden_size: int
    state_map: StateMap
    plain_socket: str
    batches: bool
    def __init__(self, version: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_nodes: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., index_paths: _Optional[_Iterable[str]] = ..., max_message_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., open_sessions: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., hidden_size: _Optional[int] = ..., state_map: _Optional[_Union[StateMap, _Mapping]] = ..., plain_socket: _Optional[str] = ..., batches: bool = ...) -> None: ...

class StateMap(_message.Message):
    __slots__ = ("numbers", "width", "model", "weights_sha256", "dtype", "layer")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    width: int
    model: str
    weights_sha256: str
    dtype: str
    layer: int
    def __init__(self, numbers: _Optional[bytes] = ..., width: _Optional[int] = ..., model: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., dtype: _Optional[str] = ..., layer: _Optional[int] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("passages",)
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    passages: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, passages: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("occurrences",)
    OCCURRENCES_FIELD_NUMBER: _ClassVar[int]
    occurrences: _containers.RepeatedCompositeFieldContainer[Occurrence]
    def __init__(self, occurrences: _Optional[_Iterable[_Union[Occurrence, _Mapping]]] = ...) -> None: ...

class Occurrence(_message.Message):
    __slots__ = ("index_path", "document", "offset")
    INDEX_PATH_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    index_path: str
    document: int
    offset: int
    def __init__(self, index_path: _Optional[str] = ..., document: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class LoadIndexRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LoadIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadIndexRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class UnloadIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListIndexesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListIndexesResponse(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paths: _Optional[_Iterable[str]] = ...) -> None: ...

class ForgetNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class ForgetNamespaceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
