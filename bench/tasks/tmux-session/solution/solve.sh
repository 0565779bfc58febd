#!/bin/bash
tmux -V

tmux new-session -d -s build -x 80 -y 24 bash --norc; sleep 0.3; tmux list-sessions -F '#{session_name}'

tmux send-keys -t build 'PS1="> "; clear; cd /work' Enter; sleep 0.3

tmux send-keys -t build 'for n in 1 2 3 4 5; do echo $n >> out; done; echo done' Enter; sleep 0.5

tmux capture-pane -p -t build | grep -v '^$' | tail -n 2

cat /work/out
