/* Does everybody hear that a run is over?
 *
 * A server is told that the run is over, and closes when its clients have said that they know it. Requests and answers may
 * be lost, a bounded number of times, and are sent again; the server may be killed, and finds the end of the run on its
 * disk, or not, in which case whoever ended it says so again.
 *
 *   heard    every client hears of it
 *   closed   the server closes
 *   told     (safety) when it closes by itself, every client knows
 */

#define CLIENTS 2
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef KILLS
#define KILLS 1
#endif

mtype = { UPDATE, UPDATED }

chan request[CLIENTS] = [1] of { byte, bool };  /* number, whether the client knows */
chan answer[CLIENTS] = [1] of { byte, bool };   /* number, whether the run is over */

bool finished, saved, acknowledged;  /* in the server's memory, on its disk, and by the word of whoever ended the run */
bool closed;
bool knows[CLIENTS];                 /* clients */
bool informed[CLIENTS];              /* the server knows that they know */
byte losses = LOSSES, kills = KILLS;

proctype Client(byte me)
{
  byte number, n; bool open, is_over;

  do
  :: atomic { !open && !closed && nfull(request[me]) ->  /* a heartbeat, or what it was told to hurry with */
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

/* One for each client, so that each is answered some time. */
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

/* Whoever ends the run says so until that is acknowledged. */
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
