#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(cat /work/tree/a/x.log)" = "failure one" ] && [ -L /work/tree/b/link.txt ] && [ ! -e /work/tree/backup ] || { echo "wrong files"; exit 1; }
echo "3 passed"
