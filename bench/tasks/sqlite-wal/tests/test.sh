#!/bin/bash
[ "$(cat /work/count)" = 250 ] && [ "$(sqlite3 /work/shop.db 'select count(*) from orders')" = 250 ] || { echo "wrong number"; exit 1; }
[ ! -e /work/shop.db-wal ] || { echo "a log is left"; exit 1; }
echo "2 passed"
