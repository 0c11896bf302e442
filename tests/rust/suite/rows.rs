//! Operations that are told how much goes to each rank: when they are compiled, or when they run.

use std::sync::Arc;

use _native::call::{Call, Site};
use _native::ops::{Buffer, Dtype, Op, Part, Parts, PartsFields, Ragged, RaggedFields};

use super::{Memory, Suite, pattern};

/// Rows of the result, or of the operand, that nobody sends.
const SPARE: usize = 2;

impl Suite<'_> {
    /// Some, or no, rows of `count` elements from each rank to each, in the order of the ranks, and a rest of the
    /// result that comes from nobody.
    pub(super) fn parts(
        &self,
        op: Op,
        (rows, is_same): (fn(usize, usize, usize) -> usize, bool),
        dtype: Dtype,
        count: usize,
        offset: usize,
    ) {
        let (rank, size) = (self.rank(), self.size());
        let roots = if op.row().has_root { 0..size } else { 0..1 };
        for root in roots {
            let site = Site { root: root as i32, ..Site::new(op, self.comm) };
            let (mut sends, mut receives) = (Vec::new(), Vec::new());
            let (mut send, mut expected) = (Vec::new(), Vec::new());
            for peer in 0..size {
                let counts = [rows(rank, peer, root) * count, rows(peer, rank, root) * count];
                let sent = if is_same { &Vec::new() } else { &send };
                let starts = [sent, &expected].map(|bytes: &Vec<u8>| bytes.len() / dtype.size());
                sends.push(Part { rank: peer, start: starts[0], count: counts[0] });
                receives.push(Part { rank: peer, start: starts[1], count: counts[1] });
                if !is_same || peer == 0 {
                    send.extend(pattern(dtype, rank, peer, counts[0]));
                }
                expected.extend(pattern(dtype, peer, if is_same { 0 } else { rank }, counts[1]));
            }
            // Of the result, nobody sends the end.
            expected.extend(vec![0; 2 * dtype.size()]);
            let fields = PartsFields { sends, receives, whole: None };
            let parts = Parts::new(self.comm.rank, self.comm.size, &fields).expect("starts and counts");
            let site = Site { parts: Some(Arc::new(parts)), ..site };
            let result = self.execute(&site, &send, dtype, expected.len() / dtype.size(), offset);
            if let Some(result) = result {
                result.check(&expected, &(op, dtype, count, offset, root));
            }
        }
    }

    /// Rows of `count` elements, whose numbers are in arrays, which are exchanged or known already; there and back.
    /// At last more rows than the capacity.
    pub(super) fn ragged(&self, op: Op, dtype: Dtype, count: usize, offset: usize) {
        let (rank, size) = (self.rank(), self.size());
        let rows = |from: usize, to: usize| (from + 2 * to + 1) % 3;
        let sent: Vec<i32> = (0..size).map(|to| rows(rank, to) as i32).collect();
        let received: Vec<i32> = (0..size).map(|from| rows(from, rank) as i32).collect();
        let both = [&sent[..], &received[..]].concat();
        let of = |counts: &[i32]| counts.iter().sum::<i32>() as usize;
        let spare = || pattern(dtype, rank, size, SPARE * count);
        let zeros = vec![0; SPARE * count * dtype.size()];
        let block = |from: usize, to: usize| pattern(dtype, from, to, rows(from, to) * count);
        let mine = (0..size).flat_map(|to| block(rank, to)).collect::<Vec<u8>>();
        let theirs = (0..size).flat_map(|from| block(from, rank)).collect::<Vec<u8>>();
        let site = |adjoint, capacity: usize| {
            let fields = RaggedFields { rows: of(&sent) + SPARE, capacity, row: count, has_owners: false };
            let ragged = Ragged::new(self.comm.rank, self.comm.size, fields, adjoint).expect("rows");
            let (ragged, envelope_result) = (Some(Arc::new(ragged)), !adjoint);
            Site { ragged, envelope_result, reverse: adjoint, ..Site::new(op, self.comm) }
        };
        let room = of(&received) + SPARE;
        for (adjoint, counts) in [(false, &sent), (false, &both), (true, &sent), (true, &both)] {
            let site = site(adjoint, room);
            let (from, expected) = if adjoint { (&theirs, &mine) } else { (&mine, &theirs) };
            let mut from = Memory::holding(dtype, &[&from[..], &spare()].concat(), offset);
            let expected = [&expected[..], &zeros].concat();
            let mut to = Memory::new(dtype, expected.len() / dtype.size(), offset);
            let mut learnt = vec![-7; size];
            let call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("any sizes");
            // SAFETY: an array that outlives the call.
            let came = unsafe { Buffer::new(learnt.as_mut_ptr().cast(), Dtype::Int32, size) };
            let came = (!adjoint).then_some(came);
            let call = Call { counts, received: came, ..call };
            self.carry(&call).unwrap_or_else(|error| panic!("{error}"));
            to.check(&expected, &(op, dtype, count, offset, adjoint, counts));
            assert_eq!(learnt, if adjoint { vec![-7; size] } else { received.clone() });
        }
        // All ranks have one row too many for them, so that none waits.
        let site = site(false, of(&received));
        let mut from = Memory::holding(dtype, &[&mine[..], &spare()].concat(), offset);
        let mut to = Memory::new(dtype, of(&received) * count, offset);
        let call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("any sizes");
        let more: Vec<i32> = sent.iter().enumerate().map(|(to, n)| n + i32::from(to == rank)).collect();
        let error = self.carry(&Call { counts: &more, ..call }).expect_err("there is no room");
        let expected = format!("'capacity' must be at least the {} rows that rank {rank}", of(&received) + 1);
        assert!(error.to_string().contains(&expected), "{error}");
    }
}
