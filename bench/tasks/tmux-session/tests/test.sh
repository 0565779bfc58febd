#!/bin/bash
tmux has-session -t build || { echo "no session"; exit 1; }
[ "$(tr '\n' ' ' < /work/out)" = "1 2 3 4 5 " ] || { echo "wrong numbers"; exit 1; }
echo "2 passed"
