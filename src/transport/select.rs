//! Which transport carries out operations, by where their arrays are: from the environment, once.

use std::sync::OnceLock;

use super::{ROWS, Row, Transport};
use crate::comm::Group;
use crate::error::{Cause, Error};

/// Where arrays are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    Cpu,
    Cuda,
}

impl Platform {
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Cuda];

    /// XLA's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// What an environment that says nothing means.
    fn default(self) -> &'static str {
        match self {
            Self::Cpu => "mpi",
            Self::Cuda => "staged",
        }
    }
}

pub const TRANSPORT: &str = "MPI4JAX_TRANSPORT";
pub const USE_CUDA_MPI: &str = "MPI4JAX_USE_CUDA_MPI";
const AUTO: &str = "auto";

/// What the environment asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// A row's name, or `auto`; `None` where nothing is asked for.
    name: Option<&'static str>,
    /// The setting, as the user wrote it.
    setting: String,
    /// It is about arrays on GPUs only.
    gpu_only: bool,
}

fn value(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Setting {
    fn from_environment() -> Result<Self, Error> {
        Self::parse(value(TRANSPORT).as_deref(), value(USE_CUDA_MPI).as_deref())
    }

    fn parse(transport: Option<&str>, cuda_mpi: Option<&str>) -> Result<Self, Error> {
        let named = match transport {
            None => None,
            Some(text) => Some(
                known(text).ok_or_else(|| Cause::UnknownTransport { name: text.into(), valid: valid() })?,
            ),
        };
        let wanted = match cuda_mpi.map(|text| (text, text.to_ascii_lowercase())) {
            None => None,
            Some((text, lower)) => match lower.as_str() {
                "1" | "true" | "on" | "yes" => Some("cuda-mpi"),
                "0" | "false" | "off" | "no" => Some("staged"),
                _ => {
                    let message = format!(
                        "{USE_CUDA_MPI}={text} is not understood: expected 1 (which means \
                         {TRANSPORT}=cuda-mpi) or 0 (staged)"
                    );
                    return Err(Cause::Setting { message }.into());
                }
            },
        };
        match (named, wanted) {
            (None, None) => Ok(Self::default()),
            (Some(name), Some(wanted)) if name != wanted => {
                let message = format!(
                    "{TRANSPORT}={name} contradicts {USE_CUDA_MPI}={}, which means {wanted}: unset one of \
                     them; {TRANSPORT} takes {}",
                    cuda_mpi.unwrap_or_default(),
                    valid()
                );
                Err(Cause::Setting { message }.into())
            }
            (Some(name), _) => {
                Ok(Self { name: Some(name), setting: format!("{TRANSPORT}={name}"), gpu_only: false })
            }
            (None, Some(wanted)) => {
                let setting = format!("{USE_CUDA_MPI}={}", cuda_mpi.unwrap_or_default());
                Ok(Self { name: Some(wanted), setting, gpu_only: true })
            }
        }
    }

    /// The transport for arrays on a platform, and why. `common` are the rows that could start on all
    /// ranks, for `auto`.
    fn choose(&self, platform: Platform, common: u64) -> (&'static str, String) {
        let default = platform.default();
        let Some(name) = self.name else { return (default, "the default".into()) };
        let setting = &self.setting;
        if name == AUTO {
            let best = ROWS
                .iter()
                .enumerate()
                .filter(|(i, row)| row.priority > 0 && row.is_for(platform) && common >> i & 1 == 1)
                .max_by_key(|(_, row)| row.priority);
            return match best {
                Some((_, row)) if platform == Platform::Cuda => {
                    (row.name, format!("{setting}: the best that can start on all ranks"))
                }
                _ => (default, format!("{setting}: the default, as nothing better can start on all ranks")),
            };
        }
        let fits = by_name(name).is_some_and(|row| row.is_for(platform));
        // A transport for GPUs says nothing about arrays in host memory. The other way round is an error
        // that `start` reports: nothing takes arrays on GPUs unasked.
        if platform == Platform::Cpu && (self.gpu_only || !fits) {
            return (default, format!("{setting} is about arrays on GPUs"));
        }
        (name, setting.clone())
    }
}

fn by_name(name: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.name == name)
}

fn known(text: &str) -> Option<&'static str> {
    if text == AUTO { Some(AUTO) } else { by_name(text).map(|row| row.name) }
}

/// What `MPI4JAX_TRANSPORT` may say.
fn valid() -> String {
    let names = ROWS.iter().map(|row| row.name).chain([AUTO]);
    names.collect::<Vec<_>>().join(", ")
}

/// What was chosen for one platform. It is started when it is first needed.
#[derive(Debug)]
struct Slot {
    name: &'static str,
    reason: String,
    transport: OnceLock<Result<Box<dyn Transport>, String>>,
}

#[derive(Debug)]
struct Selection {
    request: Setting,
    slots: [Slot; 2],
}

static SELECTION: OnceLock<Selection> = OnceLock::new();

/// Reads the environment. With `auto` or `ucx` this is collective over `MPI_COMM_WORLD`: ranks that chose
/// differently would wait for each other for ever.
pub fn select() -> Result<(), Error> {
    if SELECTION.get().is_some() {
        return Ok(());
    }
    let request = Setting::from_environment()?;
    let is_auto = request.name == Some(AUTO);
    // Wrong ones are errors, also of a transport that is not chosen.
    let settings = ROWS.iter().map(|row| (row.settings)(is_auto)).collect::<Result<Vec<_>, _>>()?;
    let mut common = 0;
    if is_auto {
        for (i, row) in ROWS.iter().enumerate().filter(|(_, row)| row.priority > 0) {
            // Every rank asks every question, because some are asked by all together.
            let able = (row.suits)()? && (row.probe)(Platform::Cuda).is_ok();
            common |= Group::World.common_bits(u64::from(able))? << i;
        }
    }
    let slots = Platform::ALL.map(|platform| {
        let (name, mut reason) = request.choose(platform, common);
        let of_row = ROWS.iter().zip(&settings).find(|(row, _)| row.name == name);
        if let Some((_, Some(settings))) = of_row {
            reason += &format!("; {settings}");
        }
        Slot { name, reason, transport: OnceLock::new() }
    });
    SELECTION.get_or_init(|| Selection { request, slots });
    // What has to be started by all ranks together is started here, where they all come by.
    let early = |platform| by_name(slot(platform).ok()?.name).filter(|row| row.starts_early);
    if early(Platform::Cpu).is_some() {
        selected(Platform::Cpu)?;
    }
    if early(Platform::Cuda).is_some() {
        // A machine without a GPU has no arrays there: an error only if there is one after all.
        let _ = selected(Platform::Cuda);
    }
    Ok(())
}

fn selection() -> Result<&'static Selection, Error> {
    if SELECTION.get().is_none() {
        select()?;
    }
    SELECTION.get().ok_or_else(|| Cause::Setting { message: "no transport is selected".into() }.into())
}

fn slot(platform: Platform) -> Result<&'static Slot, Error> {
    Ok(&selection()?.slots[platform as usize])
}

/// The transport for arrays on a platform, the same one for the life of the process.
#[inline]
pub fn selected(platform: Platform) -> Result<&'static dyn Transport, Error> {
    let slot = slot(platform)?;
    let started = slot.transport.get_or_init(|| match by_name(slot.name) {
        Some(row) if row.is_for(platform) => (row.start)(platform),
        _ => Err(format!("it does not take arrays on {}", platform.name())),
    });
    match started {
        Ok(transport) => Ok(&**transport),
        Err(reason) => Err(unavailable(platform, slot, reason)),
    }
}

/// The transport for arrays on a platform, if it has been started.
pub fn running(platform: Platform) -> Option<&'static dyn Transport> {
    SELECTION.get()?.slots[platform as usize].transport.get()?.as_deref().ok()
}

#[cold]
fn unavailable(platform: Platform, slot: &Slot, reason: &str) -> Error {
    let others = ROWS.iter().filter(|row| row.name != slot.name && row.is_for(platform));
    let others: Vec<_> = others
        .map(|row| match (row.probe)(platform) {
            Ok(()) => format!("{TRANSPORT}={} can be used here", row.name),
            Err(reason) => format!("{} cannot ({reason})", row.name),
        })
        .collect();
    Cause::Unavailable {
        name: slot.name,
        because: slot.reason.as_str().into(),
        reason: reason.into(),
        others: others.join("; ").into(),
    }
    .into()
}

/// Platform, name, why it was chosen, why it cannot be used after all.
pub type Choice = (&'static str, &'static str, String, Option<String>);

/// Platform, name, why it cannot be used.
pub type Found = (&'static str, &'static str, Option<String>);

/// What was asked for, what was chosen for each platform, and all that there is. Loads libraries to see whether they
/// could be used, but starts no transport.
pub fn overview() -> Result<(String, Vec<Choice>, Vec<Found>), Error> {
    let selection = selection()?;
    let probe = |row: &Row, platform| row.is_for(platform).then(|| (row.probe)(platform).err());
    let choice = |platform: Platform| {
        let Slot { name, reason, transport } = &selection.slots[platform as usize];
        let error = match transport.get() {
            Some(started) => started.as_ref().err().cloned(),
            None => by_name(name).and_then(|row| {
                let elsewhere = || Some(format!("it does not take arrays on {}", platform.name()));
                probe(row, platform).unwrap_or_else(elsewhere)
            }),
        };
        (platform.name(), *name, reason.clone(), error)
    };
    let found = |row: &'static Row| {
        Platform::ALL.map(|platform| probe(row, platform).map(|error| (platform.name(), row.name, error)))
    };
    Ok((
        selection.request.setting.clone(),
        Platform::ALL.into_iter().map(choice).collect(),
        ROWS.iter().flat_map(found).flatten().collect(),
    ))
}

fn row(platform: Platform) -> Option<&'static Row> {
    slot(platform).ok().and_then(|slot| by_name(slot.name))
}

/// Why messages of arrays on a platform do not meet those of MPI, if they do not.
pub fn messages_apart(platform: Platform) -> Option<&'static str> {
    row(platform).and_then(|row| (row.messages_apart)())
}

/// Whether XLA packs ghost cells into messages for the transport of arrays on a platform.
pub fn takes_packed(platform: Platform) -> bool {
    row(platform).is_some_and(|row| (row.takes_packed)(platform))
}

/// What a platform's arrays are carried by, without starting or probing anything.
pub fn chosen(platform: Platform) -> Result<(&'static str, &'static str), Error> {
    slot(platform).map(|slot| (slot.name, slot.reason.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(transport: Option<&str>, cuda_mpi: Option<&str>) -> (&'static str, &'static str) {
        let request = Setting::parse(transport, cuda_mpi).unwrap();
        (request.choose(Platform::Cpu, 0).0, request.choose(Platform::Cuda, 0).0)
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
            (Some("mpi"), Some("0"), ["contradicts", "staged", "auto"]),
        ] {
            let message = Setting::parse(transport, cuda_mpi).unwrap_err().to_string();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }

    #[test]
    fn auto_takes_the_best_that_all_ranks_have() {
        let request = Setting::parse(Some("auto"), None).unwrap();
        for (i, row) in ROWS.iter().enumerate() {
            let (name, _) = request.choose(Platform::Cuda, 1 << i);
            let expected = if row.priority > 0 && row.is_for(Platform::Cuda) { row.name } else { "staged" };
            assert_eq!(name, expected);
        }
        assert_eq!(request.choose(Platform::Cpu, !0).0, "mpi");
    }
}
