#!/bin/bash
cat /work/jobs

(setsid redis-server --port 6400 --save '' >/work/redis.log 2>&1 </dev/null &); sleep 1; redis-cli -p 6400 ping

while read -r job; do redis-cli -p 6400 rpush jobs "$job"; done < /work/jobs

redis-cli -p 6400 lrange jobs 0 -1
