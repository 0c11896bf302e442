//! Which transport carries out operations, by where their arrays are: from the environment, once.

use std::sync::{Arc, OnceLock};

use super::dispatch::{Transport, Way};
use super::mpi::{is_cuda_aware, probe_device_pointers};
use super::nccl::{self, Messages, Nccl, Unfinished};
use super::ucx;
use crate::comm::{Comm, Group};
use crate::device::cuda::Driver;
use crate::device::{self, Device, Platform};
use crate::error::{Cause, Error};

/// A transport that can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mpi,
    Staged,
    CudaMpi,
    Nccl,
    Ucx,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Mpi, Self::Staged, Self::CudaMpi, Self::Nccl, Self::Ucx];

    /// What `MPI4JAX_TRANSPORT` calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Mpi => "mpi",
            Self::Staged => "staged",
            Self::CudaMpi => "cuda-mpi",
            Self::Nccl => "nccl",
            Self::Ucx => "ucx",
        }
    }

    fn is_for(self, platform: Platform) -> bool {
        match self {
            Self::Mpi => platform == Platform::Cpu,
            Self::CudaMpi | Self::Nccl => platform == Platform::Cuda,
            // Staging on the CPU is for tests: the whole path, with host memory in the part of the device.
            Self::Staged | Self::Ucx => true,
        }
    }

    /// Whether it could start, or why not. Asks this process only, and starts nothing.
    fn probe(self, platform: Platform) -> Result<(), String> {
        match (self, platform) {
            (Self::Mpi, _) | (Self::Staged, Platform::Cpu) => Ok(()),
            (Self::Staged, Platform::Cuda) => device::support(),
            (Self::CudaMpi, _) => probe_device_pointers(),
            (Self::Nccl, _) => nccl::probe(),
            (Self::Ucx, _) => ucx::probe(platform),
        }
    }

    fn start(self, platform: Platform) -> Result<Transport, String> {
        // Collective: also on a rank that cannot use it.
        let ucx = if self == Self::Ucx { Some(ucx::start()?) } else { None };
        if self != Self::Nccl {
            self.probe(platform)?;
        }
        if platform == Platform::Cpu {
            let way = if self == Self::Staged { Way::Staged } else { Way::Host };
            return Ok(Transport::new(self.name(), way, ucx, Device::Host));
        }
        device::support()?;
        let driver = Driver::get()?;
        if let Some(ucx) = ucx {
            ucx.reaches_cuda()?;
        }
        let way = match self {
            Self::Mpi | Self::Staged => Way::Staged,
            Self::CudaMpi | Self::Ucx => Way::Direct(driver),
            Self::Nccl => Way::Nccl(Nccl::new(driver)),
        };
        Ok(Transport::new(self.name(), way, ucx, Device::Gpu(driver)))
    }

    /// The best of those that can start on all ranks, and suit all of them, for arrays on GPUs. Collective over
    /// `MPI_COMM_WORLD`.
    fn best() -> Result<Option<Self>, Cause> {
        // All ranks see the same answers, so they ask the same questions.
        for kind in [Self::Nccl, Self::CudaMpi] {
            let suits = if kind == Self::Nccl { nccl::one_gpu_each()? } else { is_cuda_aware() };
            let is_able = suits && kind.probe(Platform::Cuda).is_ok();
            if Group::World.common_bits(u64::from(is_able))? == 1 {
                return Ok(Some(kind));
            }
        }
        Ok(None)
    }
}

const TRANSPORT: &str = "MPI4JAX_TRANSPORT";
const USE_CUDA_MPI: &str = "MPI4JAX_USE_CUDA_MPI";
const AUTO: &str = "auto";

/// What the environment asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Setting {
    /// `None` where nothing is asked for, and with `auto`.
    kind: Option<Kind>,
    is_auto: bool,
    /// The setting, as the user wrote it.
    text: String,
    /// It is about arrays on GPUs only.
    gpu_only: bool,
}

fn value(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What `MPI4JAX_TRANSPORT` may say.
fn valid() -> String {
    let names = Kind::ALL.into_iter().map(Kind::name).chain([AUTO]);
    names.collect::<Vec<_>>().join(", ")
}

impl Setting {
    fn parse(transport: Option<&str>, cuda_mpi: Option<&str>) -> Result<Self, Cause> {
        let meant = match cuda_mpi.map(str::to_ascii_lowercase).as_deref() {
            None => None,
            Some("1" | "true" | "on" | "yes") => Some(Kind::CudaMpi),
            Some("0" | "false" | "off" | "no") => Some(Kind::Staged),
            Some(other) => {
                let message = format!(
                    "{USE_CUDA_MPI}={other} is not understood: expected 1 (which means {TRANSPORT}=cuda-mpi) or 0 \
                     (staged)"
                );
                return Err(Cause::Setting { message });
            }
        };
        let cuda_mpi = format!("{USE_CUDA_MPI}={}", cuda_mpi.unwrap_or_default());
        let Some(name) = transport else {
            let text = if meant.is_some() { cuda_mpi } else { String::new() };
            return Ok(Self { kind: meant, is_auto: false, text, gpu_only: meant.is_some() });
        };
        let (kind, is_auto) = (Kind::ALL.into_iter().find(|kind| kind.name() == name), name == AUTO);
        if kind.is_none() && !is_auto {
            let message = format!("unknown transport {name:?}: {TRANSPORT} takes {}", valid());
            return Err(Cause::Setting { message });
        }
        let text = format!("{TRANSPORT}={name}");
        if let Some(meant) = meant.filter(|meant| kind != Some(*meant)) {
            let message = format!(
                "{text} contradicts {cuda_mpi}, which means {}: unset one of them; {TRANSPORT} takes {}",
                meant.name(),
                valid()
            );
            return Err(Cause::Setting { message });
        }
        Ok(Self { kind, is_auto, text, gpu_only: false })
    }

    /// The transport for arrays on a platform, and why. `best` is what `auto` has found.
    fn choose(&self, platform: Platform, best: Option<Kind>) -> (Kind, String) {
        let default = if platform == Platform::Cpu { Kind::Mpi } else { Kind::Staged };
        let text = &self.text;
        match self.kind {
            None if !self.is_auto => (default, "the default".into()),
            None => match best.filter(|_| platform == Platform::Cuda) {
                Some(kind) => (kind, format!("{text}: the best that can start on all ranks")),
                None => (default, format!("{text}: the default, as nothing better can start on all ranks")),
            },
            // A transport for GPUs says nothing about arrays in host memory. The other way round is an error
            // when it is started: nothing takes arrays on GPUs unasked.
            Some(kind) if platform == Platform::Cpu && (self.gpu_only || !kind.is_for(platform)) => {
                (default, format!("{text} is about arrays on GPUs"))
            }
            Some(kind) => (kind, text.clone()),
        }
    }
}

/// What was chosen for one platform. It is started when it is first needed.
#[derive(Debug)]
struct Slot {
    kind: Kind,
    reason: String,
    transport: OnceLock<Result<Transport, String>>,
}

#[derive(Debug)]
struct Selection {
    setting: String,
    slots: [Slot; 2],
}

static SELECTION: OnceLock<Selection> = OnceLock::new();

/// Reads the environment, once. With `auto` or `ucx` this is collective over `MPI_COMM_WORLD`: ranks that chose
/// differently would wait for each other for ever.
fn selection() -> Result<&'static Selection, Error> {
    if let Some(selection) = SELECTION.get() {
        return Ok(selection);
    }
    let setting = Setting::parse(value(TRANSPORT).as_deref(), value(USE_CUDA_MPI).as_deref())?;
    // A wrong one is an error also where NCCL is not chosen.
    let messages = Messages::read(setting.is_auto)?;
    let best = if setting.is_auto { Kind::best()? } else { None };
    let slots = Platform::ALL.map(|platform| {
        let (kind, mut reason) = setting.choose(platform, best);
        if kind == Kind::Nccl {
            reason += &format!("; messages: {}", messages.name());
        }
        Slot { kind, reason, transport: OnceLock::new() }
    });
    let selection = SELECTION.get_or_init(|| Selection { setting: setting.text, slots });
    // UCX is started by all ranks together: here, where they all come by. A machine without a GPU has no arrays there: an
    // error only if there is one after all.
    let [on_cpu, on_gpu] = [&selection.slots[0], &selection.slots[1]].map(|slot| slot.kind == Kind::Ucx);
    if on_cpu {
        selected(Platform::Cpu)?;
    }
    if on_gpu {
        let _ = selected(Platform::Cuda);
    }
    Ok(selection)
}

/// Name of what carries arrays on the CPU and on a GPU, and why it was chosen. At the first call as collective as reading the
/// environment; starts nothing but UCX.
pub fn select() -> Result<[(&'static str, &'static str); 2], Error> {
    Ok(selection()?.slots.each_ref().map(|slot| (slot.kind.name(), &*slot.reason)))
}

fn slot(platform: Platform) -> Result<&'static Slot, Error> {
    Ok(&selection()?.slots[platform as usize])
}

fn elsewhere(platform: Platform) -> String {
    format!("it does not take arrays on {}", platform.name())
}

/// The transport for arrays on a platform, the same one for the life of the process.
#[inline]
pub fn selected(platform: Platform) -> Result<&'static Transport, Error> {
    let slot = slot(platform)?;
    let started = slot.transport.get_or_init(|| {
        if slot.kind.is_for(platform) { slot.kind.start(platform) } else { Err(elsewhere(platform)) }
    });
    started.as_ref().map_err(|reason| unavailable(platform, slot, reason))
}

#[cold]
fn unavailable(platform: Platform, slot: &Slot, reason: &str) -> Error {
    let others = Kind::ALL.into_iter().filter(|&kind| kind != slot.kind && kind.is_for(platform));
    let others: Vec<_> = others
        .map(|kind| match kind.probe(platform) {
            Ok(()) => format!("{TRANSPORT}={} can be used here", kind.name()),
            Err(reason) => format!("{} cannot ({reason})", kind.name()),
        })
        .collect();
    Cause::Unavailable {
        name: slot.kind.name(),
        because: slot.reason.as_str().into(),
        reason: reason.into(),
        others: others.join("; ").into(),
    }
    .into()
}

/// The transports that have been started.
fn running() -> impl Iterator<Item = &'static Transport> {
    let slots = SELECTION.get().into_iter().flat_map(|selection| &selection.slots);
    slots.filter_map(|slot| slot.transport.get()?.as_ref().ok())
}

/// Meets the other ranks of a communicator that is about to be used for the first time, where a transport needs that.
/// Collective then. What comes of it is attached to the communicator, and dropped when that is freed.
pub fn attach(comm: &Arc<Comm>) -> Result<(), Error> {
    for ucx in running().filter_map(Transport::ucx) {
        ucx.join(comm)?;
    }
    Ok(())
}

/// What calls have put on streams, and has not happened yet. Called from the watchdog's thread.
pub fn unfinished() -> Vec<Unfinished> {
    running().filter_map(Transport::nccl).flat_map(Nccl::unfinished).collect()
}

/// The program ends: from now on there are no calls.
pub fn stop() {
    running().filter_map(Transport::ucx).for_each(ucx::Worker::stop);
}

/// The setting that chose; why each of the two that were chosen cannot be used after all; and platform, name and reason of
/// all that cannot be used.
pub type Overview = (String, Vec<Option<String>>, Vec<(&'static str, &'static str, String)>);

/// What was asked for, and what cannot be used. Loads libraries to see whether they could be used, but starts no transport.
pub fn overview() -> Result<Overview, Error> {
    let selection = selection()?;
    let error = |platform: Platform| {
        let Slot { kind, transport, .. } = &selection.slots[platform as usize];
        match transport.get() {
            Some(started) => started.as_ref().err().cloned(),
            None if kind.is_for(platform) => kind.probe(platform).err(),
            None => Some(elsewhere(platform)),
        }
    };
    let unavailable = |kind: Kind| {
        let platforms = Platform::ALL.into_iter().filter(move |&platform| kind.is_for(platform));
        platforms
            .filter_map(move |platform| Some((platform.name(), kind.name(), kind.probe(platform).err()?)))
    };
    Ok((
        selection.setting.clone(),
        Platform::ALL.into_iter().map(error).collect(),
        Kind::ALL.into_iter().flat_map(unavailable).collect(),
    ))
}

/// Why messages of arrays on a platform do not meet those of MPI, if they do not.
pub fn messages_apart(platform: Platform) -> Option<&'static str> {
    match slot(platform).ok()?.kind {
        Kind::Ucx => Some("with MPI4JAX_TRANSPORT=ucx, send and recv do not meet the messages of MPI"),
        Kind::Nccl if Messages::setting() == Messages::Nccl => Some(
            "send and recv go through NCCL, and do not meet the messages of MPI; MPI4JAX_NCCL_MESSAGES=staged \
             lets all messages go through MPI",
        ),
        _ => None,
    }
}

/// Whether XLA packs ghost cells into messages for the transport of arrays on a platform, because the processor does not
/// reach the blocks.
pub fn takes_packed(platform: Platform) -> bool {
    platform == Platform::Cuda || slot(platform).is_ok_and(|slot| slot.kind == Kind::Staged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(transport: Option<&str>, cuda_mpi: Option<&str>) -> (&'static str, &'static str) {
        let setting = Setting::parse(transport, cuda_mpi).unwrap();
        let name = |platform| setting.choose(platform, None).0.name();
        (name(Platform::Cpu), name(Platform::Cuda))
    }

    #[test]
    fn the_environment_chooses() {
        assert_eq!(chosen(None, None), ("mpi", "staged"));
        assert_eq!(chosen(Some("mpi"), None), ("mpi", "mpi"), "an error when a GPU's array comes");
        assert_eq!(chosen(Some("ucx"), None).0, "ucx");
        assert_eq!(chosen(Some("auto"), None), ("mpi", "staged"));
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
        for kind in [Kind::Nccl, Kind::CudaMpi] {
            assert_eq!(setting.choose(Platform::Cuda, Some(kind)).0, kind);
            assert_eq!(setting.choose(Platform::Cpu, Some(kind)).0, Kind::Mpi);
        }
    }
}
