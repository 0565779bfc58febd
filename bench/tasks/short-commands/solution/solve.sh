#!/bin/bash
find /work/tree -type f -name '*.log' | sort

find /work/tree -type f -empty | sort

grep -rl error /work/tree | sort

grep -rc error /work/tree --include='*.log' | sort

find /work/tree -type f -size +1k | sort

wc -l /work/tree/*/*.txt | tail -n 1

awk -F, '{sum += $2} END {print sum}' /work/tree/b/sales.csv

sort -t, -k2 -nr /work/tree/b/sales.csv | head -n 1

cut -d, -f1 /work/tree/b/sales.csv | sort | uniq -c | sort -rn | head -n 1

find /work/tree -type d | wc -l

md5sum /work/tree/a/one.txt

mkdir -p /work/tree/backup && cp /work/tree/*/*.log /work/tree/backup/ && ls /work/tree/backup

tar -cf - -C /work/tree a --sort=name --mtime=@0 | wc -c

sed -i 's/error/failure/' /work/tree/a/x.log && cat /work/tree/a/x.log

find /work/tree -name '*.txt' -exec chmod 600 {} + && stat -c '%a' /work/tree/a/one.txt

ln -s ../a/one.txt /work/tree/b/link.txt && readlink -f /work/tree/b/link.txt

diff /work/tree/a/x.log /work/tree/backup/x.log

rm -r /work/tree/backup && ls /work/tree
