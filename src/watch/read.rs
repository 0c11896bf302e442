//! The states of the ranks of this host, as they are read from the board, for this host and for others.

use std::path::Path;
use std::sync::atomic::Ordering;

use super::between;
use super::hosts::QuestionKind;
use super::python::{self, Place};
use super::settings::{Settings, watchdog};
use super::state::{Need, Peer, RankStatus, State, Wait, WaitId, World};
use crate::board::cell::FREED;
use crate::board::ranks::Ranks;
use crate::board::slot::{hash, milliseconds};
use crate::board::{Life, Slot, board, own};
use crate::comm::CommId;
use crate::comm::origin::FREED as FREED_ORIGIN;
use crate::mpilib::wildcards;
use crate::ops::Op;
use crate::record::clock;
use crate::record::recorder::{self, Record, RecordState};
use crate::system::process::{self, ProcessState};
use crate::system::{folder, os};

/// How many of its last operations a report has.
const LAST: usize = recorder::LAST as usize;
/// After this time a watchdog that has not looked gets no time, in milliseconds.
const SILENT: u64 = 12_000;
/// For how long a thread that has used the processor counts as one that goes on.
const BUSY: u64 = 7_000;

/// A hash of what is certainly equal on all ranks of a collective. XLA packs the cells of a halo exchange on some ranks, and the core
/// does on others.
fn what_of(record: &Record) -> u64 {
    let op = if record.op == Op::HaloExchange { Op::Alltoallv } else { record.op };
    let root = if op.row().has_root { record.root } else { 0 };
    hash((op as u8, root, &record.reduction))
}

fn need_of(record: &Record) -> Need {
    let (row, any) = (record.op.row(), wildcards());
    if row.is_collective() {
        let what = what_of(record);
        return Need::Collective { comm: record.comm.id, number: record.sequence, what };
    }
    let end = |takes_part: bool, rank: i32, tag: i32| {
        (takes_part && rank != any.proc_null).then(|| Peer {
            rank: (rank != any.source).then(|| record.comm.world_rank(rank).unwrap_or(Ranks::ELSEWHERE)),
            tag: (tag != any.tag).then_some(tag),
        })
    };
    let from = end(row.receives(), record.source, record.recvtag);
    let to = end(row.sends(), record.dest, record.sendtag);
    Need::Message { comm: record.comm.id, key: record.comm.id.key(), from, to }
}

fn wait_of(record: &Record) -> Wait {
    let id = WaitId::Operation(record.ticket);
    let wait = Wait::new(id, need_of(record), record.comm.world.clone(), record.to_string());
    Wait { seconds: record.seconds().unwrap_or_default(), has_line: !record.line.is_empty(), ..wait }
}

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

fn line(record: &Record) -> String {
    let ago = time(clock::seconds_since(record.ended));
    match (record.state, record.seconds().map(time)) {
        (RecordState::Started, _) => format!("{record}: for {ago}"),
        (RecordState::Failed, Some(time)) => format!("{record}: failed after {time}"),
        (RecordState::Failed, None) => format!("{record}: failed"),
        (RecordState::Done, Some(time)) => format!("{record}: took {time}, ended {ago} ago"),
        (RecordState::Done, None) => format!("{record}: began {ago} ago"),
    }
}

/// What a rank waits for: operations, and what its watchdog has written.
pub fn waits(slot: &Slot) -> Vec<Wait> {
    let mut waits: Vec<Wait> = recorder::running(slot).iter().map(wait_of).collect();
    waits.extend(serde_json::from_str::<Vec<Wait>>(&slot.waits.read()).unwrap_or_default());
    waits
}

/// The state of a process that others can see, and whether it is halted.
fn state(slot: &Slot) -> (State, bool) {
    let pid = slot.pid.load(Ordering::Relaxed) as i32;
    if slot.life() == Life::Finished {
        return (State::Finished, false);
    }
    let own = own().space.load(Ordering::Relaxed);
    // Numbers of processes in another container say nothing.
    if own == 0 || slot.space.load(Ordering::Relaxed) != own {
        return (State::Runs, false);
    }
    match process::state(pid, slot.start.load(Ordering::Relaxed)) {
        None => (State::Gone, false),
        Some(ProcessState::Stopped) => (State::Stopped, true),
        Some(_) => (State::Runs, os::is_traced(pid)),
    }
}

/// Whether a process has died before it called `MPI_Finalize`.
pub fn is_gone(slot: &Slot) -> bool {
    state(slot).0 == State::Gone
}

/// Why a rank that waits goes on nevertheless.
fn goes_on(slot: &Slot, waits: usize) -> Option<String> {
    let now = milliseconds();
    let is_recent = |time: u64| time != 0 && now.saturating_sub(time) < BUSY;
    if slot.threads.load(Ordering::Relaxed) as usize > waits {
        return Some("another Python thread that has communicated before".into());
    }
    if slot.lost_pending.load(Ordering::Relaxed) > 0 {
        return Some("more pending requests than are watched".into());
    }
    is_recent(slot.busy.load(Ordering::Relaxed)).then(|| "another thread that uses the processor".into())
}

/// The status of a rank.
pub fn status(slot: &Slot) -> RankStatus {
    let (state, is_halted) = state(slot);
    let pid = slot.pid.load(Ordering::Relaxed) as i32;
    let is_over = matches!(state, State::Finished | State::Gone);
    let waits = if is_over { Vec::new() } else { waits(slot) };
    let last = recorder::last(slot, LAST);
    let before = match last.last() {
        Some(record) if record.state == RecordState::Started && state == State::Gone => {
            format!("; it was in {record}")
        }
        Some(record) if record.state == RecordState::Failed => format!("; the last one, {record}, failed"),
        Some(record) => format!("; the last one was {record}"),
        None => "; it has called no operation".into(),
    };
    let place = match state {
        State::Runs => python::place_now(slot),
        State::Finished => Place::default(),
        _ => python::place(slot),
    };
    let cells = || slot.cells.iter().filter(|cell| cell.id.load(Ordering::Acquire) != 0);
    let number = |cell: &crate::board::Cell| cell.number.load(Ordering::Relaxed);
    let id = |cell: &crate::board::Cell| {
        let id = CommId::of_cell(cell);
        if cell.has(FREED) { CommId { origin: FREED_ORIGIN, name: 0, ..id } } else { id }
    };
    let looked = slot.looked.load(Ordering::Relaxed);
    let messages = slot.peers.iter().filter(|peer| peer.key.load(Ordering::Acquire) != 0).map(|peer| {
        let load = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        (load(&peer.comm), peer.rank.load(Ordering::Relaxed), load(&peer.sent), load(&peer.received))
    });
    RankStatus {
        state,
        process: process::name(pid),
        is_halted,
        is_silent: !is_over && !waits.is_empty() && milliseconds().saturating_sub(looked) > SILENT,
        goes_on: goes_on(slot, waits.len()),
        started: if state == State::Gone {
            recorder::running(slot).iter().map(need_of).collect()
        } else {
            recorder::pending(slot)
                .iter()
                .map(need_of)
                .filter(|it| matches!(it, Need::Message { .. }))
                .collect()
        },
        waits,
        begun: slot.next.load(Ordering::Acquire),
        copies: slot.copies.load(Ordering::Relaxed),
        counts: cells().map(|cell| (id(cell), number(cell))).collect(),
        forgotten: slot.lost_number.load(Ordering::Relaxed),
        noted: between::noted(slot),
        messages: messages.collect(),
        tags: recorder::tags(slot),
        others: [&slot.lost_sent, &slot.lost_received].map(|it| it.load(Ordering::Relaxed)),
        seconds: last.last().map_or(0.0, |record| clock::seconds_since(record.ended)),
        before,
        activity: place.activity,
        python: place.at,
        exception: place.exception,
        last: last.iter().map(line).collect(),
    }
}

/// The states of the ranks of this host that have come.
pub fn world() -> World {
    board().here().map(|(rank, slot)| (rank, status(slot))).collect()
}

/// Whether a debugger is attached to a rank of this host, or one is stopped.
pub fn is_halted() -> bool {
    board().here().any(|(_, slot)| state(slot).1)
}

/// The exceptions that these ranks are handling, a line each.
pub fn exceptions(ranks: &[i32]) -> String {
    python::ask(|rank| ranks.contains(&rank), python::PATIENCE);
    let of = |&rank: &i32| {
        let status = status(board().slot(rank)?);
        (!status.exception.is_empty()).then(|| format!("\n  rank {rank} is handling {}", status.exception))
    };
    ranks.iter().filter_map(of).collect()
}

/// What another host is told of the ranks of this one.
pub fn told(kind: QuestionKind) -> World {
    match (kind, watchdog()) {
        (QuestionKind::Status, _) => {}
        // The other host has printed its report: a file system that hangs keeps no answer from it.
        (QuestionKind::Leave, Some(watchdog)) => {
            let _ = leave_board(&watchdog.settings);
            return World::new();
        }
        _ => python::ask(|_| true, python::PATIENCE),
    }
    world()
}

/// Leaves a copy of the board where reports are.
pub fn leave_board(settings: &Settings) -> Result<&Path, String> {
    let directory = &settings.directory;
    if !board().is_shared() {
        return Err("they have no board in shared memory".into());
    }
    let written = folder::write(&directory.join("board"), &board().bytes());
    written.map(|()| &**directory).map_err(|error| format!("{}: {error}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Site;
    use crate::comm::{self, Comm};

    #[test]
    fn collectives_are_told_apart_except_the_two_forms_of_a_halo_exchange() {
        let comm = comm::register(Comm::new("what-of", 0, 2));
        let what = |op| what_of(&recorder::record_in_test(Site::new(op, &comm)));
        assert_eq!(what(Op::HaloExchange), what(Op::Alltoallv));
        let others = [Op::Allreduce, Op::Scan, Op::Alltoall, Op::Alltoallv].map(what);
        assert!(others.iter().enumerate().all(|(i, one)| !others[..i].contains(one)));
    }
}
