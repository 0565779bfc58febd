from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class criu_req_type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMPTY: _ClassVar[criu_req_type]
    DUMP: _ClassVar[criu_req_type]
    RESTORE: _ClassVar[criu_req_type]
    NOTIFY: _ClassVar[criu_req_type]

class criu_cg_mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IGNORE: _ClassVar[criu_cg_mode]

class criu_network_lock_method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SKIP: _ClassVar[criu_network_lock_method]
EMPTY: criu_req_type
DUMP: criu_req_type
RESTORE: criu_req_type
NOTIFY: criu_req_type
IGNORE: criu_cg_mode
SKIP: criu_network_lock_method

class inherit_fd(_message.Message):
    __slots__ = ("key", "fd")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    key: str
    fd: int
    def __init__(self, key: _Optional[str] = ..., fd: _Optional[int] = ...) -> None: ...

class criu_opts(_message.Message):
    __slots__ = ("images_dir_fd", "pid", "leave_running", "tcp_established", "shell_job", "file_locks", "log_level", "notify_scripts", "link_remap", "inherit_fd", "manage_cgroups_mode", "ghost_limit", "irmap_scan_paths", "external", "timeout", "network_lock", "skip_file_rwx_check", "images_dir", "log_to_stderr")
    IMAGES_DIR_FD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEAVE_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TCP_ESTABLISHED_FIELD_NUMBER: _ClassVar[int]
    SHELL_JOB_FIELD_NUMBER: _ClassVar[int]
    FILE_LOCKS_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_SCRIPTS_FIELD_NUMBER: _ClassVar[int]
    LINK_REMAP_FIELD_NUMBER: _ClassVar[int]
    INHERIT_FD_FIELD_NUMBER: _ClassVar[int]
    MANAGE_CGROUPS_MODE_FIELD_NUMBER: _ClassVar[int]
    GHOST_LIMIT_FIELD_NUMBER: _ClassVar[int]
    IRMAP_SCAN_PATHS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    NETWORK_LOCK_FIELD_NUMBER: _ClassVar[int]
    SKIP_FILE_RWX_CHECK_FIELD_NUMBER: _ClassVar[int]
    IMAGES_DIR_FIELD_NUMBER: _ClassVar[int]
    LOG_TO_STDERR_FIELD_NUMBER: _ClassVar[int]
    images_dir_fd: int
    pid: int
    leave_running: bool
    tcp_established: bool
    shell_job: bool
    file_locks: bool
    log_level: int
    notify_scripts: bool
    link_remap: bool
    inherit_fd: _containers.RepeatedCompositeFieldContainer[inherit_fd]
    manage_cgroups_mode: criu_cg_mode
    ghost_limit: int
    irmap_scan_paths: _containers.RepeatedScalarFieldContainer[str]
    external: _containers.RepeatedScalarFieldContainer[str]
    timeout: int
    network_lock: criu_network_lock_method
    skip_file_rwx_check: bool
    images_dir: str
    log_to_stderr: bool
    def __init__(self, images_dir_fd: _Optional[int] = ..., pid: _Optional[int] = ..., leave_running: bool = ..., tcp_established: bool = ..., shell_job: bool = ..., file_locks: bool = ..., log_level: _Optional[int] = ..., notify_scripts: bool = ..., link_remap: bool = ..., inherit_fd: _Optional[_Iterable[_Union[inherit_fd, _Mapping]]] = ..., manage_cgroups_mode: _Optional[_Union[criu_cg_mode, str]] = ..., ghost_limit: _Optional[int] = ..., irmap_scan_paths: _Optional[_Iterable[str]] = ..., external: _Optional[_Iterable[str]] = ..., timeout: _Optional[int] = ..., network_lock: _Optional[_Union[criu_network_lock_method, str]] = ..., skip_file_rwx_check: bool = ..., images_dir: _Optional[str] = ..., log_to_stderr: bool = ...) -> None: ...

class criu_req(_message.Message):
    __slots__ = ("type", "opts", "notify_success")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    type: criu_req_type
    opts: criu_opts
    notify_success: bool
    def __init__(self, type: _Optional[_Union[criu_req_type, str]] = ..., opts: _Optional[_Union[criu_opts, _Mapping]] = ..., notify_success: bool = ...) -> None: ...

class criu_notify(_message.Message):
    __slots__ = ("script",)
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    script: str
    def __init__(self, script: _Optional[str] = ...) -> None: ...

class criu_resp(_message.Message):
    __slots__ = ("type", "success", "notify", "cr_errno", "cr_errmsg")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_FIELD_NUMBER: _ClassVar[int]
    CR_ERRNO_FIELD_NUMBER: _ClassVar[int]
    CR_ERRMSG_FIELD_NUMBER: _ClassVar[int]
    type: criu_req_type
    success: bool
    notify: criu_notify
    cr_errno: int
    cr_errmsg: str
    def __init__(self, type: _Optional[_Union[criu_req_type, str]] = ..., success: bool = ..., notify: _Optional[_Union[criu_notify, _Mapping]] = ..., cr_errno: _Optional[int] = ..., cr_errmsg: _Optional[str] = ...) -> None: ...
