/* Model of a drain, to check that the drain ends.
 *
 * Two clients are at home at server A, which is drained to server B. A bounded number of requests and answers may be
 * lost; clients send them again. A kill of server A ends the drain, and the operator starts another. Server A is not
 * killed between the copy of its accounts and its end: docs/operations.md says that a restart ends a drain. `explore.py`
 * checks the counts in the messages over the product's own classes; this model keeps only the waiting.
 *
 *   drained   the drain ends: server A is taken away
 *   moved     then every client finds its way to server B
 *   counted   (safety) nothing that was acknowledged is missing when A is taken away
 */

#define CLIENTS 2
#define STEPS 1  /* that each client counts after its first messages */
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef KILLS
#define KILLS 1
#endif

#define A 0
#define B 1
#define ANY 2  /* the proxy chooses */

mtype = { HELLO, UPDATE, WELCOME, UPDATED, REFUSED }

/* Each client has at most one open request; the answer repeats its number. */
chan request[CLIENTS] = [1] of { mtype, byte, byte, byte };  /* kind, home, number, steps */
chan answer[CLIENTS] = [1] of { mtype, byte, byte, bool };   /* kind, home, number, leaving */

bool leaving, copied, gone;       /* of server A */
byte held_a[CLIENTS], held_b[CLIENTS], heir[CLIENTS];  /* steps at A, at B, and copied from A to B */
bool guest[CLIENTS];              /* known at A, without an account, and not asked to leave */
bool has_account[CLIENTS];        /* at A */
bool there[CLIENTS];              /* known at B */
byte home[CLIENTS];
byte acknowledged[CLIENTS];
byte losses = LOSSES, kills = KILLS;

#define MAX(a, b) ((a) > (b) -> (a) : (b))

proctype Client(byte me)
{
  byte number, steps, told;
  byte h, n; bool is_leaving, moving; mtype kind;
  mtype open;      /* the request that has no answer; 0: none */
  byte to;

  do
  :: atomic { steps < STEPS && !gone -> steps++ }
  :: atomic { open == 0 && moving && nfull(request[me]) ->  /* between two homes, nothing is counted anywhere */
       number = (number + 1) % 4; open = HELLO; to = ANY; request[me]!HELLO, ANY, number, 0 }
  :: atomic { open == 0 && !moving && nfull(request[me]) ->
       number = (number + 1) % 4; open = UPDATE; to = home[me]; told = steps; request[me]!UPDATE, to, number, told }
#ifndef NEVER_AGAIN
  :: atomic { open != 0 && empty(request[me]) && empty(answer[me]) ->  /* sent again: one of them was lost */
       request[me]!open, to, number, told }
#endif
  :: atomic { answer[me]?kind, h, n, is_leaving ->
       if
       :: n != number || open == 0 -> skip  /* late */
       :: else ->
          open = 0;
          if
          :: kind == WELCOME -> home[me] = h; moving = false
          :: kind == REFUSED -> moving = true
          :: kind == UPDATED -> acknowledged[me] = MAX(acknowledged[me], told); moving = is_leaving
          fi
       fi }
  od
}

/* Both servers and the proxy: one process for each client, so that fairness answers every client. */
proctype Servers(byte me)
{
  byte to, number, steps; mtype kind;

  do
  :: atomic { nempty(request[me]) && nfull(answer[me]) ->
       request[me]?kind, to, number, steps;
       if
       :: kind == HELLO ->
          to = ((leaving || gone) -> B : A);
          if
          :: to == A && !has_account[me] -> guest[me] = true
          :: to == B -> there[me] = true
          :: else -> skip
          fi;
          answer[me]!WELCOME, to, number, false
       :: kind == UPDATE && to == A && gone -> answer[me]!REFUSED, A, number, false
       :: kind == UPDATE && to == A && !gone ->
          if
          :: steps > 0 -> has_account[me] = true; guest[me] = false; held_a[me] = MAX(held_a[me], steps)
          :: steps == 0 && !has_account[me] -> guest[me] = !leaving
          :: else -> skip
          fi;
          answer[me]!UPDATED, A, number, leaving
       :: kind == UPDATE && to == B ->
          there[me] = true; held_b[me] = MAX(held_b[me], steps);
          answer[me]!UPDATED, B, number, false
       fi }
  od
}

/* Clients that the operator waits for. A guest with its home at B is silent at A, and soon not counted any more. */
#ifdef NO_WAIT
#define IS_HERE(c) false
#else
#ifdef NO_GUESTS
#define IS_HERE(c) (has_account[c] && !(there[c] && held_b[c] >= held_a[c]))
#else
#define IS_HERE(c) ((guest[c] && home[c] == A) || (has_account[c] && !(there[c] && held_b[c] >= held_a[c])))
#endif
#endif

proctype Operator()
{
  byte c;
begin:
  leaving = true;
  do
  :: !leaving -> goto begin  /* the server was killed, which ended the drain */
  :: atomic { leaving && !IS_HERE(0) && !IS_HERE(1) ->
       heir[0] = held_a[0]; heir[1] = held_a[1]; copied = true }
     break
  od;
  atomic {
    gone = true;
    c = 0;
    do
    :: c < CLIENTS -> assert(acknowledged[c] <= MAX(held_b[c], heir[c])); c++
    :: else -> break
    od
  }
}

/* A bounded number of faults. */
proctype Faults()
{
  mtype kind; byte h, n, s; bool l;
  do
  :: atomic { losses > 0 && nempty(request[0]) -> request[0]?kind, h, n, s; losses-- }
  :: atomic { losses > 0 && nempty(request[1]) -> request[1]?kind, h, n, s; losses-- }
  :: atomic { losses > 0 && nempty(answer[0]) -> answer[0]?kind, h, n, l; losses-- }
  :: atomic { losses > 0 && nempty(answer[1]) -> answer[1]?kind, h, n, l; losses-- }
  /* The server reads accounts from its disk, and guests send a message within seconds. */
  :: atomic { kills > 0 && leaving && !copied ->
       kills--; leaving = false;
       guest[0] = !has_account[0]; guest[1] = !has_account[1] }
  :: break
  od
}

init
{
  atomic {
    guest[0] = true; guest[1] = true;
    run Client(0); run Client(1); run Servers(0); run Servers(1); run Operator(); run Faults()
  }
}

ltl drained { <> gone }
ltl moved { [] (gone -> <> (home[0] == B && home[1] == B)) }
