//! The settings of the watchdog, and those that all ranks must have alike.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::groups::ranks_in_words;
use crate::board::ranks::{Ranks, grouped};
use crate::board::{Once, board, own};
use crate::comm::{Group, hash};
use crate::error::Cause;
use crate::output::print;

/// Settings: name, what has to be equal of the value, and the value as the user wrote it, which is empty where it is unset.
pub type Shared = Vec<(String, String, String)>;

/// The settings of the watchdog.
#[derive(Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject), pyo3(from_item_all))]
pub struct Settings {
    /// Of this process, in `MPI_COMM_WORLD`.
    pub rank: i32,
    pub size: i32,
    /// The job, by a name that no other job of this user has.
    pub job: String,
    /// Where a report is left.
    pub directory: PathBuf,
    /// After how many seconds an operation counts as hung; infinity: never.
    pub timeout: f64,
    /// Seconds until a warning about an operation that waits; infinity: never.
    pub report_after: f64,
    /// Seconds until a job that is stuck is ended; infinity: never.
    pub deadlock_after: f64,
    /// Whether a hung operation aborts the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
    /// Whether this is the first rank of its host, and whether all ranks are of it.
    pub is_first_here: bool,
    pub on_one_host: bool,
    /// The descriptor of standard error as the user sees it.
    pub stderr: i32,
    /// What all ranks must have alike.
    pub shared: Shared,
    /// Version and build of this package.
    pub build: String,
    /// Names of programs that start ranks.
    pub launchers: Vec<String>,
}

pub struct Watchdog {
    pub settings: Settings,
    /// The process that is watched: a forked child is no rank.
    process: u32,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// The watchdog, in the process that it was started in.
pub fn watchdog() -> Option<&'static Watchdog> {
    WATCHDOG.get().filter(|watchdog| watchdog.process == std::process::id())
}

/// The watchdog of this rank; none if there has been one before.
pub fn make(settings: Settings) -> Option<&'static Watchdog> {
    WATCHDOG.set(Watchdog { settings, process: std::process::id() }).ok()?;
    WATCHDOG.get()
}

/// Tells the other ranks of this host the settings of this one, which has taken its slot.
pub fn publish(settings: &Settings) {
    own().settings.write(&serde_json::to_string(&(&settings.shared, &settings.build)).unwrap_or_default());
}

/// A rank, its settings, and its build.
type Known = (i32, (Shared, String));

/// Settings and builds of these ranks of this host, as far as they are known.
fn known(ranks: impl Iterator<Item = i32>) -> Vec<Known> {
    let of = |rank| Some((rank, serde_json::from_str(&board().slot(rank)?.settings.read()).ok()?));
    ranks.filter_map(of).collect()
}

/// The settings in which these ranks of this host differ, in words. `None`: no difference is known. Prints a line if builds differ.
pub fn difference_among(ranks: impl Iterator<Item = i32>) -> Option<String> {
    let known = known(ranks);
    say_builds(&builds(&known));
    difference(&known)
}

fn builds(known: &[Known]) -> Vec<(String, Ranks)> {
    grouped(known.iter().map(|(rank, (_, build))| (build.clone(), *rank)))
}

/// Ranks of other hosts run other builds of this package.
static OTHERS_DIFFER: AtomicBool = AtomicBool::new(false);

/// Whether ranks run different builds of this package, as far as is known, which is said once.
pub fn builds_differ() -> bool {
    let mut ranks: Vec<i32> = board().here().map(|(rank, _)| rank).collect();
    ranks.sort_unstable();
    let groups = builds(&known(ranks.into_iter()));
    say_builds(&groups);
    groups.len() > 1 || OTHERS_DIFFER.load(Ordering::Relaxed)
}

fn say_builds(groups: &[(String, Ranks)]) {
    if groups.len() > 1 && board().is_first_to(Once::Builds) {
        let part = |(build, ranks): &(String, Ranks)| format!("{build} on {}", ranks_in_words(ranks));
        let parts = groups.iter().map(part).collect::<Vec<_>>().join(", ");
        let rank = watchdog().map_or(0, |watchdog| watchdog.settings.rank);
        print(&format!(
            "r{rank} | mpi4jax: ranks run different builds of mpi4jax: {parts}; install one for all ranks\n"
        ));
    }
}

/// Equal on ranks whose settings and builds are equal, as the user wrote them.
pub fn hash_of(settings: &Settings) -> u64 {
    hash((&settings.shared, &settings.build))
}

/// Compares the settings of all ranks, word by word. Collective over `MPI_COMM_WORLD`.
pub fn compare_all(settings: &Settings) -> Result<(), Cause> {
    let ours = (&settings.shared, &settings.build);
    let all = Group::World.all_bytes(&serde_json::to_vec(&ours).unwrap_or_default())?;
    let all: Vec<Known> =
        (0..).zip(all.iter().map(|text| serde_json::from_slice(text).unwrap_or_default())).collect();
    let builds = builds(&all);
    OTHERS_DIFFER.store(builds.len() > 1, Ordering::Relaxed);
    if settings.rank == 0 {
        say_builds(&builds);
    }
    difference(&all).map_or(Ok(()), |message| Err(Cause::Setting { message }))
}

/// The settings in which ranks differ, in words. `None`: there is no difference.
fn difference(all: &[Known]) -> Option<String> {
    let of = |settings: &Shared, name: &str| {
        let found = settings.iter().find(|(other, ..)| other == name);
        found.map(|(_, meaning, value)| (meaning.clone(), value.clone())).unwrap_or_default()
    };
    let mut parts = Vec::new();
    for (name, ..) in all.first().into_iter().flat_map(|(_, (settings, _))| settings) {
        let (meanings, values): (Vec<_>, Vec<_>) =
            all.iter().map(|(_, (settings, _))| of(settings, name)).unzip();
        if meanings.iter().any(|meaning| *meaning != meanings[0]) {
            let part = |(value, ranks): &(String, Ranks)| {
                let value = if value.is_empty() { "unset".into() } else { format!("{value:?}") };
                format!("{value} on {}", ranks_in_words(ranks))
            };
            let groups = grouped(values.into_iter().zip(all.iter().map(|(rank, _)| *rank)));
            parts.push(format!("{name} is {}", groups.iter().map(part).collect::<Vec<_>>().join(", ")));
        }
    }
    (!parts.is_empty()).then(|| {
        format!(
            "settings differ between ranks: {}; all ranks must have the same (mpiexec of Open MPI passes \
             variables on to other hosts with -x NAME)",
            parts.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_names_variables_ranks_and_values() {
        let settings = |one: &str, other: &str| -> (Shared, String) {
            let shared =
                [("A", one), ("B", other)].map(|(name, value)| (name.into(), value.into(), value.into()));
            (shared.into(), String::new())
        };
        let all = [(0, settings("1", "")), (3, settings("", "")), (4, settings("1", ""))];
        let words = difference(&all).unwrap_or_default();
        assert!(words.contains(": A is \"1\" on ranks 0, 4, unset on rank 3; all"), "{words}");
        let words = difference(&[(0, settings("1", "x")), (1, settings("1", "y"))]).unwrap_or_default();
        assert!(words.contains(": B is \"x\" on rank 0, \"y\" on rank 1; all"), "{words}");
        assert_eq!(difference(&all[..1]), None);
    }

    #[test]
    fn values_that_mean_the_same_are_no_difference() {
        let settings = |meaning: &str, value: &str| -> (Shared, String) {
            let shared = [("A", "1", value), ("B", meaning, value)];
            (
                shared.map(|(name, meaning, value)| (name.into(), meaning.into(), value.into())).into(),
                String::new(),
            )
        };
        let all = [(0, settings("", "x")), (1, settings("y", "y")), (2, settings("", ""))];
        let words = difference(&all).unwrap_or_default();
        assert!(words.contains(": B is \"x\" on rank 0, \"y\" on rank 1, unset on rank 2; all"), "{words}");
    }
}
