#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(cat /work/found)" = "entry-77777" ] || { echo "wrong line"; exit 1; }
echo "1 passed"
