//! Settings that all ranks must have alike, since ranks that differ in one wait for each other for ever.

use std::sync::Mutex;

use super::groups::ranks_in_words;
use super::job::ranks::{Ranks, grouped};
use super::settings::{Settings, Watchdog, watchdog};
use crate::comm::{Comm, Group, hash};
use crate::error::Cause;
use crate::sync::lock;
use crate::watch::job::host::HostFolder;

/// Ranks with the settings of this rank. Settings do not change, so they are read once.
static ALIKE: Mutex<Ranks> = Mutex::new(Ranks::NONE);

/// Settings: name, what has to be equal of the value, and the value as the user wrote it, which is empty where it is unset.
pub type Shared = Vec<(String, String, String)>;

/// Compares the settings of all ranks, of which there are so many. Collective over `MPI_COMM_WORLD`.
pub fn compare(ours: &Shared, size: i32) -> Result<(), Cause> {
    let meanings = ours.iter().map(|(name, meaning, _)| (name, meaning));
    let hash = hash(meanings.collect::<Vec<_>>());
    // The greatest number is also the least one if all are equal.
    if Group::World.largest(hash)? == !Group::World.largest(!hash)? {
        *lock(&ALIKE) = Ranks::all(size);
        return Ok(());
    }
    let all = Group::World.all_bytes(&serde_json::to_vec(ours).unwrap_or_default())?;
    let all = all.iter().map(|text| serde_json::from_slice(text).unwrap_or_default());
    let message = difference(&(0..).zip(all).collect::<Vec<_>>()).unwrap_or_default();
    Err(Cause::Setting { message })
}

/// Compares the settings of the members of a communicator, at its first collective on this rank: a program may have no use for
/// the default communicator. Of ranks that have not come yet, or are on other hosts, nothing is known.
#[cold]
pub fn compare_members(comm: &Comm) -> Result<(), Cause> {
    let Some(Watchdog { settings, host, .. }) = watchdog() else { return Ok(()) };
    let members = comm.world.iter().copied().collect();
    difference_among(host, settings, &members).map_or(Ok(()), |report| Err(Cause::Mismatch { report }))
}

/// In which settings these ranks differ, of those that have come to this host, in words. None: in none.
pub fn difference_among(host: &HostFolder, settings: &Settings, ranks: &Ranks) -> Option<String> {
    let alike = lock(&ALIKE).clone();
    let is_open = |rank: i32| rank != host.rank && !alike.contains(rank);
    if !ranks.iter().any(is_open) {
        return None;
    }
    let here = host.here();
    // Of ranks on other hosts nothing is found, however often this is asked while one waits for them.
    if !ranks.iter().any(|rank| is_open(rank) && here.contains(rank)) {
        return None;
    }
    let known = known(host, settings, ranks.iter().filter(|&rank| here.contains(rank)));
    let found = difference(&known);
    if found.is_none() {
        let mut alike = lock(&ALIKE);
        *alike = alike.iter().chain(known.iter().map(|(rank, _)| *rank)).collect();
    }
    found
}

/// The settings of these ranks, as far as they are known.
fn known(host: &HostFolder, own: &Settings, ranks: impl Iterator<Item = i32>) -> Vec<(i32, Shared)> {
    let of = |rank| if rank == host.rank { Some(own.shared.clone()) } else { host.settings(rank) };
    ranks.filter_map(|rank| Some((rank, of(rank)?))).collect()
}

/// In which settings ranks differ, in words. None: in none.
fn difference(all: &[(i32, Shared)]) -> Option<String> {
    let of = |settings: &Shared, name: &str| {
        let found = settings.iter().find(|(other, ..)| other == name);
        found.map(|(_, meaning, value)| (meaning.clone(), value.clone())).unwrap_or_default()
    };
    let mut parts = Vec::new();
    for (name, ..) in all.first().into_iter().flat_map(|(_, settings)| settings) {
        let (meanings, values): (Vec<_>, Vec<_>) = all.iter().map(|(_, settings)| of(settings, name)).unzip();
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
        let settings = |one: &str, other: &str| -> Shared {
            [("A", one), ("B", other)].map(|(name, value)| (name.into(), value.into(), value.into())).into()
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
        let settings = |meaning: &str, value: &str| -> Shared {
            vec![("A".into(), "1".into(), value.into()), ("B".into(), meaning.into(), value.into())]
        };
        let all = [(0, settings("", "x")), (1, settings("y", "y")), (2, settings("", ""))];
        let words = difference(&all).unwrap_or_default();
        assert!(words.contains(": B is \"x\" on rank 0, \"y\" on rank 1, unset on rank 2; all"), "{words}");
    }
}
