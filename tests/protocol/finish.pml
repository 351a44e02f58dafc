/* Model of the end of a run, to check that every client learns of it.
 *
 * The operator ends the run, and the server closes when all clients have confirmed the end. A bounded number of
 * requests and answers may be lost; clients send them again. The server may be killed. If the end of the run is not on
 * its disk then, the operator ends the run again.
 *
 *   heard    every client learns that the run is over
 *   over     the server closes
 *   assert   (safety) when the server closes, every client knows that the run is over
 */

#define CLIENTS 2
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef KILLS
#define KILLS 1
#endif

mtype = { UPDATE, UPDATED }

chan request[CLIENTS] = [1] of { byte, bool };  /* number, true if the client knows */
chan answer[CLIENTS] = [1] of { byte, bool };   /* number, true if the run is over */

bool finished, saved, acknowledged;  /* in the server's memory, on its disk, and to the operator */
bool closed;
bool knows[CLIENTS];                 /* clients */
bool informed[CLIENTS];              /* the server knows that they know */
byte losses = LOSSES, kills = KILLS;

proctype Client(byte me)
{
  byte number, n; bool open, is_over;

  do
  :: atomic { !open && !closed && nfull(request[me]) ->  /* a heartbeat or an urgent UPDATE */
       number = (number + 1) % 4; open = true; request[me]!number, knows[me] }
#ifndef NEVER_AGAIN
  :: atomic { open && !closed && empty(request[me]) && empty(answer[me]) -> request[me]!number, knows[me] }
#endif
  :: atomic { answer[me]?n, is_over ->
       if
       :: n == number && open -> open = false; knows[me] = knows[me] || is_over
       :: else -> skip
       fi }
  od
}

/* One process for each client, so that fairness answers every client. */
proctype Server(byte me)
{
  byte number; bool is_told;

  do
  :: atomic { nempty(request[me]) && nfull(answer[me]) && !closed ->
       request[me]?number, is_told; informed[me] = informed[me] || (is_told && finished);
       answer[me]!number, finished && saved }
  od
}

proctype Disk()
{
  do
  :: atomic { finished && !saved -> saved = true }
  :: atomic { saved && !acknowledged -> acknowledged = true }
  od
}

#ifdef NO_WAIT
#define MAY_CLOSE acknowledged
#else
#define MAY_CLOSE (acknowledged && informed[0] && informed[1])
#endif

proctype Closing()
{
  atomic { MAY_CLOSE -> closed = true; assert(knows[0] && knows[1]) }
}

/* The operator ends the run again until the server acknowledges the end. */
proctype Operator()
{
  do
  :: atomic { !acknowledged && !finished -> finished = true }
  :: acknowledged -> break
  od
}

proctype Faults()
{
  byte n; bool b;
  do
  :: atomic { losses > 0 && nempty(request[0]) -> request[0]?n, b; losses-- }
  :: atomic { losses > 0 && nempty(request[1]) -> request[1]?n, b; losses-- }
  :: atomic { losses > 0 && nempty(answer[0]) -> answer[0]?n, b; losses-- }
  :: atomic { losses > 0 && nempty(answer[1]) -> answer[1]?n, b; losses-- }
  :: atomic { kills > 0 && !closed -> kills--; finished = saved; informed[0] = false; informed[1] = false }
  :: break
  od
}

init
{
  atomic { run Client(0); run Client(1); run Server(0); run Server(1); run Disk(); run Closing(); run Operator(); run Faults() }
}

ltl heard { <> (knows[0] && knows[1]) }
ltl over { <> closed }
