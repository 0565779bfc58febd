#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
as() { setpriv --reuid "$1" --regid "$1" --clear-groups sh -c "$2" 2>/dev/null; }
as 1002 'cat /work/inbox/letter' | grep -q 1002 || { echo "own letter"; exit 1; }
as 1002 'cat /work/inbox/own' && { echo "foreign file"; exit 1; }
as 1001 'cat /work/inbox/letter' && { echo "foreign letter"; exit 1; }
echo "3 passed"
