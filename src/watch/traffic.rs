//! Whether bytes still move between this process and others: then what it waits for may be under way, and a wait proves nothing.

use crate::system::os;

/// How many bytes a second are more than what ranks that wait exchange: questions and answers of leaders.
const LIVELY: f64 = 64e3;
/// How often they are looked at, in seconds.
const LOOK: f64 = 1.0;

/// What has been seen of them.
#[derive(Default)]
pub struct Traffic {
    /// When they were looked at, and how many had moved since some time.
    last: Option<(f64, u64)>,
    is_still: bool,
}

impl Traffic {
    /// Whether bytes move, as far as is known.
    pub fn moves(&mut self, now: f64) -> bool {
        if self.last.is_none_or(|(at, _)| now - at >= LOOK) {
            self.look(now, os::moved());
        }
        !self.is_still
    }

    fn look(&mut self, now: f64, count: u64) {
        let is_few = |(at, before): (f64, u64)| {
            let moved = count.wrapping_sub(before).cast_signed();
            (moved as f64) < LIVELY * (now - at)
        };
        self.is_still = self.last.is_some_and(is_few);
        self.last = Some((now, count));
    }

    /// There is no wait: what moves meanwhile is none of the next one's.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_move_until_they_are_seen_to_be_still() {
        let mut traffic = Traffic::default();
        let mut moves = |now: f64, count| {
            traffic.look(now, count);
            !traffic.is_still
        };
        assert!(moves(0.0, 5_000_000), "of one look nothing is known");
        assert!(!moves(2.0, 5_000_300), "leaders ask and answer");
        assert!(moves(4.0, 6_000_000));
        assert!(!moves(6.0, 300), "a connection has been closed");
    }
}
