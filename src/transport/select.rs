//! The choice of a transport for each platform: from the environment, once.

use std::sync::{Arc, OnceLock};

use super::{AnyTransport, Descriptor, TARGET, Transport, Unfinished, mpi, requests};
use crate::comm::{Comm, Group};
use crate::device::{Platform, vendor};
use crate::error::{Cause, Error};
use crate::system::variable;

const TRANSPORT: &str = "MPI4JAX_TRANSPORT";
const AUTO: &str = "auto";

/// The choice that the environment asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Setting {
    /// `None` where nothing is asked for, and with `auto`.
    named: Option<&'static Descriptor>,
    is_auto: bool,
    /// The setting, as the user wrote it.
    text: String,
    /// Whether the setting is about arrays on GPUs only.
    gpu_only: bool,
}

/// The values that `MPI4JAX_TRANSPORT` may have.
fn valid() -> String {
    let names = Descriptor::ALL.iter().map(|it| it.name).chain([AUTO]);
    names.collect::<Vec<_>>().join(", ")
}

/// The transport that a value of this variable chooses.
fn by_cuda_mpi(is_wanted: bool) -> &'static Descriptor {
    let found = Descriptor::ALL.iter().find(|it| it.use_cuda_mpi == Some(is_wanted));
    found.expect("a transport for each value")
}

/// The transport of a platform's arrays where nothing is chosen.
fn default_on(platform: Platform) -> &'static Descriptor {
    Descriptor::ALL.iter().find(|it| it.default_on == Some(platform)).expect("a transport for each platform")
}

/// For `auto`: the best transport for arrays on GPUs that can start on all ranks, and suits all of them. Collective over
/// `MPI_COMM_WORLD`.
fn best() -> Result<Option<&'static Descriptor>, Cause> {
    // All ranks get the same results, so they make the same collective calls.
    for &it in Descriptor::ALL.iter().rev() {
        let Some(suits) = it.suits else { continue };
        let is_able = suits()? && (it.probe)(Platform::Gpu).is_ok();
        let is_best = Group::World.common_bits(u64::from(is_able))? == 1;
        tracing::debug!(target: TARGET, transport = it.name, here = is_able, everywhere = is_best, "looked for the best");
        if is_best {
            return Ok(Some(it));
        }
    }
    Ok(None)
}

impl Setting {
    fn read() -> Result<Self, Cause> {
        Self::parse(variable(TRANSPORT).as_deref(), variable(vendor().mpi_setting).as_deref())
    }

    /// What of the choice must be the same on all ranks: nothing, if its operations match the
    /// operations of ranks that go through MPI.
    fn shared(&self) -> &'static str {
        if self.is_auto { AUTO } else { self.named.filter(|it| !it.meets_mpi).map_or("", |it| it.name) }
    }

    fn parse(transport: Option<&str>, cuda_mpi: Option<&str>) -> Result<Self, Cause> {
        let meant = match cuda_mpi.map(str::to_ascii_lowercase).as_deref() {
            None => None,
            Some("1" | "true" | "on" | "yes") => Some(by_cuda_mpi(true)),
            Some("0" | "false" | "off" | "no") => Some(by_cuda_mpi(false)),
            Some(other) => {
                let [yes, no] = [true, false].map(|is_wanted| by_cuda_mpi(is_wanted).name);
                let name = vendor().mpi_setting;
                let message = format!(
                    "{name}={other} is not understood: expected 1 (which means {TRANSPORT}={yes}) or 0 ({no})"
                );
                return Err(Cause::Setting { message });
            }
        };
        let cuda_mpi = format!("{}={}", vendor().mpi_setting, cuda_mpi.unwrap_or_default());
        let Some(name) = transport else {
            let text = if meant.is_some() { cuda_mpi } else { String::new() };
            return Ok(Self { named: meant, is_auto: false, text, gpu_only: meant.is_some() });
        };
        let (named, is_auto) = (Descriptor::named(name), name == AUTO);
        if named.is_none() && !is_auto {
            let message = format!("unknown transport {name:?}: {TRANSPORT} takes {}", valid());
            return Err(Cause::Setting { message });
        }
        let text = format!("{TRANSPORT}={name}");
        if let Some(meant) = meant.filter(|&meant| named != Some(meant)) {
            let message = format!(
                "{text} contradicts {cuda_mpi}, which means {}: unset one of them; {TRANSPORT} takes {}",
                meant.name,
                valid()
            );
            return Err(Cause::Setting { message });
        }
        Ok(Self { named, is_auto, text, gpu_only: false })
    }

    /// The transport for arrays on a platform, and why. `best` is what `auto` has found.
    fn choose(&self, platform: Platform, best: Option<&'static Descriptor>) -> (&'static Descriptor, String) {
        let (default, text) = (default_on(platform), &self.text);
        match self.named {
            None if !self.is_auto => (default, "the default".into()),
            None => match best.filter(|_| platform == Platform::Gpu) {
                Some(best) => (best, format!("{text}: the best that can start on all ranks")),
                None => (default, format!("{text}: the default, as nothing better can start on all ranks")),
            },
            // A setting of a transport for GPUs does not concern arrays in host memory. The
            // converse fails when an operation runs: arrays on GPUs need a transport that was
            // chosen for them.
            Some(named) if platform == Platform::Cpu && (self.gpu_only || !(named.takes)(platform)) => {
                (default, format!("{text} is about arrays on GPUs"))
            }
            Some(named) => (named, text.clone()),
        }
    }
}

/// What was chosen for one platform. It is started when it is first needed.
#[derive(Debug)]
struct Slot {
    chosen: &'static Descriptor,
    reason: String,
    transport: OnceLock<Result<AnyTransport, String>>,
}

#[derive(Debug)]
struct Selection {
    setting: String,
    slots: [Slot; 2],
}

static SELECTION: OnceLock<Selection> = OnceLock::new();

/// Reads the environment, once. With `auto`, and with a transport that all ranks start together, this is collective over
/// `MPI_COMM_WORLD`: ranks that chose differently would wait for each other forever.
fn selection() -> Result<&'static Selection, Error> {
    if let Some(selection) = SELECTION.get() {
        return Ok(selection);
    }
    let setting = Setting::read()?;
    requests::check_setting()?;
    mpi::read_setting()?;
    let own = Descriptor::ALL.iter().map(|it| Ok((it.name, (it.settings)(setting.is_auto)?)));
    let own = own.collect::<Result<Vec<_>, Cause>>()?;
    let best = if setting.is_auto { best()? } else { None };
    let slots = Platform::ALL.map(|platform| {
        let (chosen, mut reason) = setting.choose(platform, best);
        if let Some((_, Some(words))) = own.iter().find(|(name, _)| *name == chosen.name) {
            reason += &format!("; {words}");
        }
        Slot { chosen, reason, transport: OnceLock::new() }
    });
    let selection = SELECTION.get_or_init(|| Selection { setting: setting.text, slots });
    for (platform, Slot { chosen, reason, .. }) in Platform::ALL.into_iter().zip(&selection.slots) {
        tracing::info!(target: TARGET, transport = chosen.name, platform = platform.name(), reason, "chosen");
    }
    // Some are started by all ranks together: here, where they all come by. A machine without a GPU has no arrays there: an
    // error only if there is one after all.
    let [on_cpu, on_gpu] = [&selection.slots[0], &selection.slots[1]].map(|slot| slot.chosen.is_collective);
    if on_cpu {
        selected(Platform::Cpu)?;
    }
    if on_gpu {
        let _ = selected(Platform::Gpu);
    }
    Ok(selection)
}

/// The variable that chooses, what of its value must be the same on all ranks, and the value as it was written; and whether
/// all ranks start what it chooses together.
pub type Choice = ((&'static str, &'static str, String), bool);

/// What the environment chooses, before anything is chosen: ranks whose settings differ would wait for each other forever.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "transport_choice"))]
pub fn choice() -> Result<Choice, Error> {
    let setting = Setting::read()?;
    let shared = (TRANSPORT, setting.shared(), variable(TRANSPORT).unwrap_or_default());
    Ok((shared, setting.is_auto || setting.named.is_some_and(|it| it.is_collective)))
}

/// Name of what carries arrays on the CPU and on a GPU, and why it was chosen. At the first call as collective as reading the
/// environment; starts only what all ranks start together.
pub fn select() -> Result<[(&'static str, &'static str); 2], Error> {
    Ok(selection()?.slots.each_ref().map(|slot| (slot.chosen.name, &*slot.reason)))
}

fn slot(platform: Platform) -> Result<&'static Slot, Error> {
    Ok(&selection()?.slots[platform as usize])
}

fn elsewhere(platform: Platform) -> String {
    format!("it does not take arrays on {}", platform.name())
}

/// The transport for arrays on a platform, the same one for the life of the process.
#[inline]
pub fn selected(platform: Platform) -> Result<&'static AnyTransport, Error> {
    let slot = slot(platform)?;
    let started = slot.transport.get_or_init(|| start(platform, slot.chosen));
    started.as_ref().map_err(|reason| unavailable(platform, slot, reason))
}

#[cold]
fn start(platform: Platform, chosen: &Descriptor) -> Result<AnyTransport, String> {
    let started = if (chosen.takes)(platform) { (chosen.start)(platform) } else { Err(elsewhere(platform)) };
    let (transport, platform) = (chosen.name, platform.name());
    match &started {
        Ok(_) => tracing::info!(target: TARGET, transport, platform, "started"),
        Err(reason) => tracing::warn!(target: TARGET, transport, platform, reason, "cannot be started"),
    }
    started
}

#[cold]
fn unavailable(platform: Platform, slot: &Slot, reason: &str) -> Error {
    let others = Descriptor::ALL.iter().filter(|&&it| it != slot.chosen && (it.takes)(platform));
    let others: Vec<_> = others
        .map(|it| match (it.probe)(platform) {
            Ok(()) => format!("{TRANSPORT}={} can be used here", it.name),
            Err(reason) => format!("{} cannot ({reason})", it.name),
        })
        .collect();
    Cause::Unavailable {
        name: slot.chosen.name,
        because: slot.reason.as_str().into(),
        reason: reason.into(),
        others: others.join("; ").into(),
    }
    .into()
}

/// The transports that have been started.
fn running() -> impl Iterator<Item = &'static AnyTransport> {
    let slots = SELECTION.get().into_iter().flat_map(|selection| &selection.slots);
    slots.filter_map(|slot| slot.transport.get()?.as_ref().ok())
}

/// Prepares a communicator that is about to be used for the first time, where a transport needs that (see [`Transport::join`]).
/// Collective then. The result is attached to the communicator, and dropped when that is freed.
pub fn attach(comm: &Arc<Comm>) -> Result<(), Error> {
    tracing::debug!(target: "mpi4jax::comm", comm = &*comm.key, rank = comm.rank, size = comm.size, "attached");
    running().try_for_each(|transport| transport.join(comm))
}

/// Operations that are on streams and have not ended. Called by the watchdog's thread.
pub fn unfinished() -> Vec<Unfinished> {
    running().flat_map(Transport::unfinished).collect()
}

/// Called at the end of the program, after the last call.
pub fn stop() {
    running().for_each(Transport::stop);
}

/// The setting that chose; why each of the two that were chosen cannot be used after all; and platform, name and reason of
/// all that cannot be used.
pub type Overview = (String, Vec<Option<String>>, Vec<(&'static str, &'static str, String)>);

/// What was asked for, and what cannot be used. Loads libraries to see whether they could be used, but starts no transport.
pub fn overview() -> Result<Overview, Error> {
    let selection = selection()?;
    let error = |platform: Platform| {
        let Slot { chosen, transport, .. } = &selection.slots[platform as usize];
        match transport.get() {
            Some(started) => started.as_ref().err().cloned(),
            None if (chosen.takes)(platform) => (chosen.probe)(platform).err(),
            None => Some(elsewhere(platform)),
        }
    };
    let unavailable = |it: &&'static Descriptor| {
        let platforms = Platform::ALL.into_iter().filter(|&platform| (it.takes)(platform));
        platforms.filter_map(|platform| Some((platform.name(), it.name, (it.probe)(platform).err()?)))
    };
    Ok((
        selection.setting.clone(),
        Platform::ALL.into_iter().map(error).collect(),
        Descriptor::ALL.iter().flat_map(unavailable).collect(),
    ))
}

/// Why messages of arrays on a platform do not match messages that go through MPI, if so.
pub fn messages_apart(platform: Platform) -> Option<&'static str> {
    (slot(platform).ok()?.chosen.messages_apart)()
}

/// Whether XLA packs ghost cells into messages for the transport of arrays on a platform, because the processor does not
/// reach the blocks.
pub fn takes_packed(platform: Platform) -> bool {
    platform == Platform::Gpu || slot(platform).is_ok_and(|slot| slot.chosen.takes_packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(transport: Option<&str>, cuda_mpi: Option<&str>) -> (&'static str, &'static str) {
        let setting = Setting::parse(transport, cuda_mpi).unwrap();
        let name = |platform| setting.choose(platform, None).0.name;
        (name(Platform::Cpu), name(Platform::Gpu))
    }

    #[test]
    fn the_environment_chooses() {
        assert_eq!(chosen(None, None), ("mpi", "staged"));
        assert_eq!(chosen(Some("mpi"), None), ("mpi", "mpi"), "an error when a GPU's array comes");
        assert_eq!(chosen(Some("ucx"), None).0, "ucx");
        assert_eq!(chosen(Some("auto"), None), ("mpi", "staged"));
    }

    #[test]
    fn what_meets_mpi_need_not_be_the_same_on_all_ranks() {
        let shared = |transport, cuda_mpi| Setting::parse(transport, cuda_mpi).unwrap().shared();
        for name in [None, Some("mpi"), Some("staged"), Some("cuda-mpi")] {
            assert_eq!(shared(name, None), "");
        }
        assert_eq!(shared(None, Some("1")), "");
        for name in ["nccl", "ucx", "auto"] {
            assert_eq!(shared(Some(name), None), name);
        }
    }

    #[test]
    fn wrong_settings_are_answered_with_the_valid_ones() {
        for (transport, cuda_mpi, words) in [
            (Some("pigeon"), None, ["pigeon", "mpi, ", "auto"]),
            (Some("MPI"), None, ["MPI", "ucx", "auto"]),
            (None, Some("maybe"), ["maybe", "1", "0"]),
            (Some("ucx"), Some("1"), ["contradicts", "cuda-mpi", "ucx"]),
            (Some("auto"), Some("1"), ["contradicts", "cuda-mpi", "ucx"]),
            (Some("mpi"), Some("0"), ["contradicts", "staged", "auto"]),
        ] {
            let message = Setting::parse(transport, cuda_mpi).unwrap_err().to_string();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }

    #[test]
    fn auto_takes_the_best_that_all_ranks_have_for_gpus() {
        let setting = Setting::parse(Some("auto"), None).unwrap();
        let candidates = Descriptor::ALL.iter().rev().filter(|it| it.suits.is_some());
        let candidates: Vec<_> = candidates.copied().collect();
        assert_eq!(candidates.iter().map(|it| it.name).collect::<Vec<_>>(), ["nccl"]);
        for best in candidates {
            assert_eq!(setting.choose(Platform::Gpu, Some(best)).0, best);
            assert_eq!(setting.choose(Platform::Cpu, Some(best)).0.name, "mpi");
        }
    }

    #[test]
    fn descriptors_are_told_apart() {
        for it in Descriptor::ALL {
            assert!(!it.name.is_empty() && it.name != AUTO);
            assert_eq!(Descriptor::ALL.iter().filter(|other| other.name == it.name).count(), 1, "{it:?}");
            assert!(Platform::ALL.into_iter().any(it.takes), "{it:?}");
        }
        for platform in Platform::ALL {
            let defaults = Descriptor::ALL.iter().filter(|it| it.default_on == Some(platform));
            assert_eq!(defaults.count(), 1);
        }
        for is_wanted in [true, false] {
            let meant = Descriptor::ALL.iter().filter(|it| it.use_cuda_mpi == Some(is_wanted));
            assert_eq!(meant.count(), 1);
        }
    }
}
