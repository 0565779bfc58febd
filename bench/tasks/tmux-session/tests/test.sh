#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
tmux has-session -t build || { echo "no session"; exit 1; }
[ "$(tr '\n' ' ' < /work/out)" = "1 2 3 4 5 " ] || { echo "wrong numbers"; exit 1; }
echo "2 passed"
