#!/bin/bash
cd /work/ledger && git log --oneline --format=%s && ls

cd /work/ledger && /usr/bin/python3 -B -m unittest 2>&1 | tail -n 4 | head -n 2

cd /work/ledger && cat ledger.py

cd /work/ledger && grep -n refund test_ledger.py

cd /work/ledger && git apply - <<'END'
--- a/ledger.py
+++ b/ledger.py
@@ -6,5 +6,5 @@
         self.total += amount
 
     def refund(self, amount):
-        self.total = amount
+        self.total -= amount
         return self.total
END
git diff --stat

cd /work/ledger && /usr/bin/python3 -B -m unittest 2>&1 | tail -n 1

cd /work/ledger && git commit -qam 'A refund reduces the total' && git status --short
