//! What is in the ranks' folder, at the price of one look at the folder itself while nothing changes.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::folder::Folder;

/// For how long after a change the folder is read each time: clocks of file systems are coarse, so two changes may have
/// one time.
const UNSETTLED: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct State {
    names: HashSet<String>,
    /// When the folder was changed last, by its file system's clock, and when that was noticed.
    modified: Option<SystemTime>,
    noticed: Option<Instant>,
    /// It was read when that was long ago.
    settled: bool,
    number: u64,
}

/// The names in a folder.
#[derive(Debug, Default)]
pub struct Listing(Mutex<State>);

impl Listing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings it up to date. As long as it returns the same number, no file has come, gone or been replaced.
    pub fn look(&self, folder: &Folder) -> u64 {
        let mut state = self.state();
        let modified = folder.modified();
        if modified.is_none() || modified != state.modified {
            (state.modified, state.noticed) = (modified, Some(Instant::now()));
        } else if state.settled {
            return state.number;
        }
        state.settled = state.noticed.is_none_or(|at| at.elapsed() > UNSETTLED);
        state.names = folder.names().into_iter().collect();
        state.number += 1;
        state.number
    }

    pub fn has(&self, name: &str) -> bool {
        self.state().names.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_read_when_it_changes() {
        let base = std::env::temp_dir().join(format!("mpi4jax-listing-{}", std::process::id()));
        let folder = Folder::make(&base.join("user/job")).unwrap();
        let listing = Listing::default();
        let mut last = listing.look(&folder);
        for name in ["a", "b"] {
            folder.write(name, "temporary", "").unwrap();
            let now = listing.look(&folder);
            assert!(now > last && listing.has(name) && !listing.has("temporary"));
            last = now;
        }
        folder.write("a", "temporary", "another").unwrap();
        let now = listing.look(&folder);
        assert!(now > last, "a file was replaced");
        listing.state().noticed = Some(Instant::now() - 2 * UNSETTLED);
        assert_eq!([(); 3].map(|()| listing.look(&folder)), [now + 1; 3], "it is read once more");
        folder.remove("b");
        assert!(listing.look(&folder) > now + 1 && !listing.has("b"));
        std::fs::remove_dir_all(base).unwrap();
    }
}
