"""CRIU's RPC messages: the generated code is that of rpc.proto, and its numbers are CRIU's."""

import re
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

import snapshots.criu
from snapshots.criu import rpc_pb2

PROTO = (Path(snapshots.criu.__file__).parent / "rpc.proto").read_text()

CRIU_NUMBERS = {
    "inherit_fd": {"key": 1, "fd": 2},
    "criu_opts": {
        "images_dir_fd": 1, "pid": 2, "leave_running": 3, "tcp_established": 5, "shell_job": 7, "file_locks": 8,
        "log_level": 9, "notify_scripts": 12, "link_remap": 18, "inherit_fd": 27,
        "manage_cgroups_mode": 34, "ghost_limit": 35, "irmap_scan_paths": 36, "external": 37, "timeout": 45,
        "network_lock": 64,
        "skip_file_rwx_check": 66, "images_dir": 68,
        "log_to_stderr": 71,
    },
    "criu_req": {"type": 1, "opts": 2, "notify_success": 3},
    "criu_notify": {"script": 1},
    "criu_resp": {"type": 1, "success": 2, "notify": 5, "cr_errno": 7, "cr_errmsg": 9},
}  # fmt: skip
"""Field numbers of images/rpc.proto of CRIU 4.2."""


def written() -> dict[str, dict[str, tuple[bool, str, int]]]:
    """Return what rpc.proto says of each message: field -> (repeated, type, number)."""
    messages = re.findall(r"^message (\w+) \{\n(.*?)^\}", PROTO, re.MULTILINE | re.DOTALL)
    field = re.compile(r"^  (optional|repeated) (\w+) (\w+) = (\d+);$", re.MULTILINE)
    return {
        message: {name: (label == "repeated", kind, int(number)) for label, kind, name, number in field.findall(body)}
        for message, body in messages
    }


def generated() -> dict[str, dict[str, tuple[bool, str, int]]]:
    """Return the same of the generated code."""
    plain = {5: "int32", 8: "bool", 9: "string", 13: "uint32"}

    def kind(field: FieldDescriptor) -> str:
        named = field.message_type or field.enum_type
        return plain[field.type] if named is None else str(named.name)

    return {
        name: {field.name: (field.is_repeated, kind(field), field.number) for field in message.fields}
        for name, message in rpc_pb2.DESCRIPTOR.message_types_by_name.items()
    }


def test_generated_code_matches_the_proto_file() -> None:
    assert generated() == written()


def test_enums_match_the_proto_file() -> None:
    texts = re.findall(r"^enum (\w+) \{\n(.*?)^\}", PROTO, re.MULTILINE | re.DOTALL)
    enums = {name: {key: int(value) for key, value in re.findall(r"(\w+) = (\d+);", body)} for name, body in texts}
    assert enums == {
        name: {value.name: value.number for value in enum.values}
        for name, enum in rpc_pb2.DESCRIPTOR.enum_types_by_name.items()
    }
    assert enums["criu_req_type"] == {"EMPTY": 0, "DUMP": 1, "RESTORE": 2, "NOTIFY": 6}


def test_field_numbers_are_those_of_criu() -> None:
    numbers = {name: {field: number for field, (_, _, number) in fields.items()} for name, fields in written().items()}
    assert numbers == CRIU_NUMBERS
