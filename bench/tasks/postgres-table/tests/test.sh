#!/bin/bash
[ "$(psql -h 127.0.0.1 -p 5440 -U me postgres -tAc 'select count(*), sum(square) from t')" = "20|2870" ] || { echo "wrong table"; exit 1; }
echo "1 passed"
