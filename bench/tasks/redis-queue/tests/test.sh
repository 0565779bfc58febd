#!/bin/bash
[ "$(redis-cli -p 6400 lrange jobs 0 -1)" = "$(cat /work/jobs)" ] || { echo "wrong list"; exit 1; }
echo "1 passed"
