//! Which provider and domain of libfabric an endpoint is made of, and what a provider lacks, in words.

use std::ffi::{CStr, CString, c_char, c_int};
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::{self, NonNull};

use super::endpoint::MESSAGE;
use crate::wire::tcp_address;
use gdsync_device::error::{Error, Result};
use rdma_core_sys::Fabric;
use rdma_core_sys::fabric as fi;

/// The oldest version of the library, in the form of `fi_version`.
const OLDEST: u32 = fi::VERSION;
/// The first version whose provider `tcp` has endpoints for datagrams. Before, that was `net`.
const TCP_HAS_DATAGRAMS: u32 = 1 << 16 | 18;
/// Providers whose endpoints have IP addresses.
const OVER_IP: [&str; 5] = ["tcp", "net", "udp", "sockets", "verbs"];
/// Memory registration as this carrier can do it.
const MR_MODES: c_int = fi::FI_MR_LOCAL
    | fi::FI_MR_VIRT_ADDR
    | fi::FI_MR_ALLOCATED
    | fi::FI_MR_PROV_KEY
    | fi::FI_MR_ENDPOINT
    | fi::FI_MR_HMEM;
/// Properties of requests as this carrier can provide them.
const MODES: u64 = fi::FI_CONTEXT | fi::FI_CONTEXT2;

/// A device `fabric:NAME` cannot be used.
pub(super) fn refused(name: &str, why: String) -> Error {
    Error::Device { device: format!("fabric:{name}"), why }
}

/// A list of infos, or a part of it, which the library frees.
#[derive(Debug)]
pub(super) struct Info {
    table: &'static Fabric,
    list: NonNull<fi::fi_info>,
    chosen: NonNull<fi::fi_info>,
}

// SAFETY: the list is plain memory of the library, which only this object points to.
unsafe impl Send for Info {}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the library made the list, and it is freed once.
        unsafe { self.table.fi_freeinfo(self.list.as_ptr()) };
    }
}

impl Info {
    fn hints(table: &'static Fabric) -> Option<Self> {
        // SAFETY: of nothing, the library makes an empty one.
        let list = NonNull::new(unsafe { table.fi_dupinfo(ptr::null()) })?;
        Some(Self { table, list, chosen: list })
    }

    pub(super) fn as_ptr(&self) -> *mut fi::fi_info {
        self.chosen.as_ptr()
    }

    pub(super) fn table(&self) -> &'static Fabric {
        self.table
    }

    fn get(&self) -> &fi::fi_info {
        // SAFETY: an entry of the list, which lives as long as `self`.
        unsafe { self.chosen.as_ref() }
    }

    /// A part of hints, to be written.
    fn part<T>(&mut self, part: *mut T) -> &mut T {
        // SAFETY: callers pass pointers of these hints, which have all parts; the borrow keeps others from being made.
        unsafe { &mut *part }
    }

    pub(super) fn ep(&self) -> &fi::fi_ep_attr {
        // SAFETY: infos of the library have all attributes.
        unsafe { &*self.get().ep_attr }
    }

    pub(super) fn tx(&self) -> &fi::fi_tx_attr {
        // SAFETY: infos of the library have all attributes.
        unsafe { &*self.get().tx_attr }
    }

    pub(super) fn rx(&self) -> &fi::fi_rx_attr {
        // SAFETY: infos of the library have all attributes.
        unsafe { &*self.get().rx_attr }
    }

    pub(super) fn domain(&self) -> &fi::fi_domain_attr {
        // SAFETY: infos of the library have all attributes.
        unsafe { &*self.get().domain_attr }
    }

    pub(super) fn fabric_attr(&self) -> *mut fi::fi_fabric_attr {
        self.get().fabric_attr
    }

    pub(super) fn has_text_addresses(&self) -> bool {
        self.get().addr_format == fi::FI_ADDR_STR
    }

    pub(super) fn provider(&self) -> String {
        // SAFETY: infos of the library have all attributes.
        text(unsafe { &*self.fabric_attr() }.prov_name)
    }

    /// Goes on to the next entry of the list.
    fn next(&mut self) -> bool {
        let next = NonNull::new(self.get().next);
        self.chosen = next.unwrap_or(self.chosen);
        next.is_some()
    }

    /// What counts for a device, in words.
    fn properties(&self) -> String {
        let (tx, domain) = (self.tx(), self.domain());
        let order = if tx.msg_order & fi::FI_ORDER_SAS == 0 { "in any order" } else { "in order" };
        let registers = if domain.mr_mode & fi::FI_MR_LOCAL == 0 { "" } else { ", buffers registered" };
        let (at, inject, sends, receives) = (text(domain.name), tx.inject_size, tx.size, self.rx().size);
        format!(
            "{at}: messages {order}, {inject} bytes injected, {sends} sends and {receives} receives at once{registers}"
        )
    }

    /// What the entry lacks, and the fix.
    fn lacks(&self) -> Option<String> {
        let (ep, info, domain) = (self.ep(), self.get(), self.domain());
        let (mode, mr_mode) = (info.mode & !MODES, domain.mr_mode & !MR_MODES);
        let provider = self.provider();
        match () {
            () if ep.type_ != fi::FI_EP_RDM => Some(format!(
                "{provider} has no endpoints for reliable datagrams (FI_EP_RDM); take it with a layer that makes some: {provider};ofi_rxm"
            )),
            () if info.caps & fi::FI_MSG == 0 => {
                Some(format!("{provider} sends no messages (FI_MSG); name another provider"))
            }
            () if ep.max_msg_size < MESSAGE => Some(format!(
                "max_msg_size of {provider} is {}, and messages have up to {MESSAGE} bytes; name another provider, such as efa in place of efa-direct",
                ep.max_msg_size
            )),
            () if mode != 0 => Some(format!(
                "{provider} asks for a mode that is not supported (mode {mode:#x}); name another provider"
            )),
            () if mr_mode != 0 => Some(format!(
                "{provider} asks for memory registration that is not supported (mr_mode {mr_mode:#x}); name another provider"
            )),
            () => None,
        }
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: texts of the library are terminated and stay while it is loaded, or their info lives.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What the library says of an error number.
pub(super) fn error_text(table: &Fabric, code: impl TryInto<c_int>) -> String {
    let code = code.try_into().unwrap_or(0).saturating_abs();
    // SAFETY: the library has a text for each number.
    format!("{} ({code})", text(unsafe { table.fi_strerror(code) }))
}

/// `major.minor`
fn version(number: u32) -> String {
    format!("{}.{}", number >> 16, number & 0xffff)
}

/// The hints for `fi_getinfo`.
struct Question<'a> {
    table: &'static Fabric,
    provider: Option<&'a str>,
    domain: Option<&'a str>,
    node: Option<CString>,
    /// All that this carrier needs; otherwise anything.
    order: Option<u64>,
}

impl Question<'_> {
    /// The entries that fit.
    fn ask(&self) -> std::result::Result<Info, c_int> {
        let mut hints = Info::hints(self.table).ok_or(libc::ENOMEM)?;
        let copy = |text: Option<&str>| {
            let text = text.and_then(|text| CString::new(text).ok());
            // SAFETY: the text is terminated. The library frees the copy with the hints.
            text.map_or(ptr::null_mut(), |text| unsafe { libc::strdup(text.as_ptr()) })
        };
        let parts = *hints.get();
        hints.part(parts.fabric_attr).prov_name = copy(self.provider);
        let domain = hints.part(parts.domain_attr);
        domain.name = copy(self.domain);
        domain.mr_mode =
            if self.order.is_some() { MR_MODES } else { !(fi::FI_MR_BASIC | fi::FI_MR_SCALABLE) };
        let mut mode = !0;
        if let Some(order) = self.order {
            mode = MODES;
            domain.threading = fi::FI_THREAD_DOMAIN;
            (domain.control_progress, domain.data_progress) =
                (fi::FI_PROGRESS_MANUAL, fi::FI_PROGRESS_MANUAL);
            hints.part(parts.ep_attr).type_ = fi::FI_EP_RDM;
            hints.part(parts.tx_attr).msg_order = order;
            hints.part(parts.rx_attr).msg_order = order;
        }
        let info = hints.part(hints.as_ptr());
        (info.mode, info.caps) = (mode, if self.order.is_some() { fi::FI_MSG } else { 0 });
        let (node, flags) =
            self.node.as_ref().map_or((ptr::null(), 0), |node| (node.as_ptr(), fi::FI_SOURCE));
        let mut list = ptr::null_mut();
        // SAFETY: the texts are terminated, the hints are the library's, and `list` is valid for writing.
        let code = unsafe {
            self.table.fi_getinfo(fi::VERSION, node, ptr::null(), flags, hints.as_ptr(), &raw mut list)
        };
        match NonNull::new(list) {
            Some(list) if code == 0 => Ok(Info { table: self.table, list, chosen: list }),
            _ => Err(-code),
        }
    }
}

/// The info of the endpoint for `name`, which is `PROVIDER` or `PROVIDER/DOMAIN`. Endpoints with IP addresses have the address `ip`.
///
/// # Errors
/// [`Error::Device`] names what is missing.
pub(super) fn choose(table: &'static Fabric, name: &str, ip: IpAddr) -> Result<Info> {
    // SAFETY: it may be called at any time.
    let found = unsafe { table.fi_version() };
    if found < OLDEST {
        let (found, oldest) = (version(found), version(OLDEST));
        let why = format!(
            "libfabric is {found}, older than {oldest}: install a newer one, or name it: GDSYNC_LIBFABRIC=PATH"
        );
        return Err(refused(name, why));
    }
    let (provider, domain) = name.split_once('/').map_or((name, None), |(name, domain)| (name, Some(domain)));
    let provider = if provider == "tcp" && found < TCP_HAS_DATAGRAMS { "net" } else { provider };
    let is_over_ip = provider.split(';').next().is_some_and(|first| OVER_IP.contains(&first));
    let node = CString::new(ip.to_string()).ok().filter(|_| is_over_ip);
    let question = |order, provider| Question { table, provider, domain, node: node.clone(), order };
    let of_name = |mut info: Info| {
        while info.provider() != provider || info.lacks().is_some() {
            if !info.next() {
                return None;
            }
        }
        Some(info)
    };
    let code = match question(Some(fi::FI_ORDER_SAS), Some(provider)).ask().map(of_name) {
        Ok(Some(info)) => return Ok(info),
        Ok(None) => fi::FI_ENODATA,
        Err(code) => code,
    };
    if let Some(info) = question(Some(0), Some(provider)).ask().ok().and_then(of_name) {
        return Ok(info);
    }
    let version = version(found);
    let why = match question(None, Some(provider)).ask().map(|info| (info.lacks(), info)) {
        Ok((Some(lack), _)) => lack,
        Ok((None, _)) => format!(
            "the provider {provider} of libfabric {version} offers no such endpoint: {}; FI_LOG_LEVEL=info shows why",
            error_text(table, code)
        ),
        Err(_) => format!(
            "libfabric {version} has no provider {provider} that works here{}; its own program shows why: FI_LOG_LEVEL=info fi_info -p '{provider}'",
            others(&question(None, None))
        ),
    };
    Err(refused(name, why))
}

/// The providers that there are, for a text.
fn others(question: &Question<'_>) -> String {
    let names = names(question);
    if names.is_empty() { String::new() } else { format!(", but {}", names.join(", ")) }
}

fn names(question: &Question<'_>) -> Vec<String> {
    let mut names = Vec::new();
    if let Ok(mut info) = question.ask() {
        loop {
            let name = info.provider();
            if !names.contains(&name) {
                names.push(name);
            }
            if !info.next() {
                break;
            }
        }
    }
    names
}

/// The providers of libfabric, which is loaded for that, each with its properties in words, or why `fabric:PROVIDER` cannot be used.
///
/// # Errors
/// [`Error::Library`] without libfabric.
pub fn fabric_providers() -> Result<Vec<(String, Result<String>)>> {
    let table = Fabric::load()?;
    let ip = tcp_address(None).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let all = names(&Question { table, provider: None, domain: None, node: None, order: None });
    let each = all.into_iter().map(|name| {
        let properties = choose(table, &name, ip).map(|info| info.properties());
        (name, properties)
    });
    Ok(each.collect())
}
