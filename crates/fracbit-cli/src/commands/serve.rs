//! `fracbit serve`.

use crate::{
    args::{self, CacheArgs, NestedArgs, PickArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    generate::{Loading, Nested, Writer, context_of},
};
use clap::Args;
use fracbit::Progress;
use fracbit_base::Bytes;
use fracbit_engine::full_pages;
use fracbit_model::KvPool;
use fracbit_server::{Options, Server, interrupt};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Requests that may wait for a place.
const QUEUE: usize = 64;

const AFTER: &str = "\
Addresses: /v1/chat/completions, /v1/completions, /v1/models and /health, as in OpenAI's API, also streaming. Beside its fields requests \
may have top_k, min_p, repetition_penalty, stop_token_ids, skip_special_tokens and chat_template_kwargs. A field that the server does not know or cannot serve is refused by name.

The options under Sampling hold where a request says nothing; without a seed every request has another.

The line with the address is printed when requests are served. Ctrl-C or SIGTERM end the server; texts then have 10 s to end.

Examples:
  fracbit serve small
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}]}'
  fracbit serve small --host 0.0.0.0 --key-file key.txt --slots 8";

/// Answer other programs, over HTTP.
///
/// Serves the model in the form of OpenAI's API, several requests at a time: their texts are
/// decoded together, which takes far less time than one after the other, and a conversation that
/// goes on finds its past kept. The same request with the same seed gets the same text of a
/// quantized model, whatever else is served.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ServeArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// Address to listen at. Only this machine reaches the default; others want a key.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen at; 0 takes a free one.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// File that holds the key which requests must then present (`Authorization: Bearer KEY`).
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Name of the model in requests [default: that of its directory].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Texts at a time; further requests wait.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = args::count)]
    slots: usize,
    /// Tokens of a text with its prompt, no more than the model's context; beyond the original one
    /// of a `longrope` model (Phi) positions are those of long texts [default: 4096, or that
    /// context when it is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    /// Let what messages spell become control tokens of the chat. Prompts of /v1/completions may
    /// always spell them.
    #[arg(long)]
    allow_special: bool,
    /// Most memory of the cache of keys and values, which all texts share, such as 2GB: at least
    /// one full text, whose size is printed at the start. When it is full, requests wait, or a text
    /// that is being written does [default: as much as all texts take at their full length].
    #[arg(long, value_name = "SIZE")]
    cache_memory: Option<Bytes>,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    nested: NestedArgs,
    // Last, since the heading of a group stays for what follows it.
    #[command(flatten)]
    picking: PickArgs,
}

pub(crate) fn run(args: &ServeArgs, context: &mut Context) -> Result<(), Failure> {
    let key = args.key_file.as_deref().map(read_key).transpose()?;
    if key.is_none() && !args.host.is_loopback() {
        let rule =
            format!("`--host {}` lets other machines in: it wants `--key-file FILE` with it", args.host);
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
    }
    let nested = Nested::read(&args.nested)?;
    let opened = Arc::new(files::open(&args.model, context)?);
    let ctx = context_of(args.ctx, opened.config.max_position_embeddings)?;
    let server = Server::bind(SocketAddr::new(args.host, args.port)).map_err(failure)?;
    let address = server.address().map_err(failure)?;
    let loading = Loading::begin(&opened);
    let tokenizer = files::tokenizer(&opened, context)?;
    let writer = loading.finish(tokenizer)?.asked(nested)?;
    let Writer { model, tokenizer, end_tokens, nested } = writer;
    let Nested { scheduler, draft } = nested;
    let id = args.name.clone().unwrap_or_else(|| name_of(&args.model));
    let kv = args.cache.kv();
    let page = KvPool::page_bytes(model.config(), kv);
    let (one, all) = (full_pages(ctx, 1), full_pages(ctx, args.slots));
    let bytes = |pages: usize| Bytes(pages.saturating_mul(page) as u64);
    let pages = match args.cache_memory {
        None => all,
        Some(most) => KvPool::pages_within(model.config(), kv, most.0).min(all),
    };
    if pages < one {
        let rule = format!(
            "`--cache-memory` should be at least {}, the cache of one text of {ctx} tokens, got {}",
            bytes(one),
            args.cache_memory.unwrap_or(Bytes(0))
        );
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule))
            .hint("shorter texts (`--ctx`) and fewer bits (`--kv`) take less"));
    }
    context.progress.note(&format!(
        "`{id}`: {} texts at a time, {ctx} tokens each ({}); the cache takes at most {}",
        args.slots,
        bytes(one - 1),
        bytes(pages)
    ));
    context.out.stream(&format!("serving at http://{address}/v1\n"))?;
    let sampling = args.picking.config(0);
    let options = Options {
        id,
        slots: args.slots,
        queue: QUEUE,
        context: ctx,
        kv,
        pages: Some(pages),
        sampling,
        key,
        end_tokens,
        allow_special: args.allow_special,
        scheduler,
        draft,
    };
    server.run(&model, tokenizer, options, interrupt()).map_err(failure)
}

/// The key in a file: its text without spaces around it.
fn read_key(path: &Path) -> Result<String, Failure> {
    let text = files::read_text(path)?;
    let key = text.trim();
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        let rule = "should hold one key, of visible ASCII characters";
        return Err(Failure::input(format!("`{}` {rule}", path.display())));
    }
    Ok(key.to_owned())
}

/// The name of a directory, also of `.`.
fn name_of(model: &Path) -> String {
    let full = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn failure(error: fracbit_server::Error) -> Failure {
    let taken = matches!(&error, fracbit_server::Error::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse);
    let failure = Failure::new(Exit::Failed, error.into());
    if taken { failure.hint("`--port N` takes another port, 0 a free one") } else { failure }
}
