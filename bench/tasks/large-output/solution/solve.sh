#!/bin/bash
wc /work/log

cat /work/log

head -c 400 /work/log

sort /work/log | uniq -c | sort -rn | head -n 3

sort /work/log | uniq -c | awk '$1 == 3 {print $2}' > /work/found; cat /work/found
