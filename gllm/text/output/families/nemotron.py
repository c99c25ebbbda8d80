"""Tool calls of Nemotron Nano 2: `<TOOLCALL>[{"name": .., "arguments": {..}}, ..]</TOOLCALL>`.

Nemotron 3 writes calls as Qwen3-Coder. Source: the models' chat templates.
"""

from gllm.text.output.json_list_tool_call import list_format

FORMAT = list_format("nemotron", "<TOOLCALL>", "</TOOLCALL>", shown="<TOOLCALL>")
