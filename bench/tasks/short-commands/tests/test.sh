#!/bin/bash
[ "$(cat /work/tree/a/x.log)" = "failure one" ] && [ -L /work/tree/b/link.txt ] && [ ! -e /work/tree/backup ] || { echo "wrong files"; exit 1; }
echo "3 passed"
